"""tessera-report on results that are made here: what is on its page, and the errors for what are no results."""
import copy
import html.parser
import itertools
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True  # beside the tool
TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools/report/tessera-report"
sys.path.insert(0, str(TOOL.parent))
import page  # noqa: E402
import plots  # noqa: E402
import results  # noqa: E402

SETTINGS = {"measure": "step", "model": "gpt", "layers": 2, "width": 64, "batch": 4, "sequence": 64, "ranks": 1, "mesh": "", "strategy": "full",
            "layout": "ragged", "reshard": "auto", "precision": "fp32", "transport": "shared_memory", "offload": "none", "recompute": False,
            "transition": "R to S(0)", "steps": 10, "memory_limit_mb": 0}


def case(status="ok", milliseconds=10.0, peak=20_000_000, **settings):
    result = {"settings": {**SETTINGS, **settings}, "status": status}
    if status != "ok":
        return {**result, "message": f"<{status}> & more"}
    times = {"mean": milliseconds, "min": milliseconds, "p50": milliseconds, "p90": milliseconds, "p99": milliseconds, "max": milliseconds}
    return {**result, "seconds": 1.0, "measured": {
        "runs": 10, "milliseconds": times, "parts": {"forward": 3.0, "backward": 5.0, "clip": 0.5, "optimizer": 1.5},
        "items_per_second": 256_000 / milliseconds, "exposed_milliseconds": 1.0, "sent": {"all_gather": {"calls": 2, "bytes": 1e6}},
        "parameters": 1000, "state_bytes": 16_000_000, "peak_bytes": peak, "verified": True}}


def content_of(cases):
    return {"format": "tessera-bench", "version": 1, "machine": {"cpu": "Fast <CPU>", "cores": 2, "memory_bytes": 1 << 34, "system": "Linux"},
            "versions": {"tessera": "0.1.0", "build": "release", "libtorch": "2.11.0", "compiler": "Clang"}, "results": cases}


class Tags(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.all = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.all.append((tag, dict(attributes)))


class TesseraReportTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, content, name="results.json"):
        file = self.folder / name
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    def read(self, cases):
        return results.read(self.write(content_of(cases))).cases

    def test_the_command_writes_a_page_that_needs_nothing_else(self):
        cases = [case(strategy=strategy, ranks=ranks, milliseconds=10.0 * ranks) for strategy, ranks in itertools.product(["full", "zero-2"], [1, 2])]
        cases += [case("impossible", strategy="hybrid"), case("does not fit", batch=64), case(measure="save")]
        file, out = self.write(content_of(cases)), self.folder / "out"
        done = subprocess.run([sys.executable, TOOL, file, "--out", out], capture_output=True, text=True, timeout=300)
        self.assertEqual((done.returncode, done.stdout), (0, f"{out}/index.html\n"), done.stderr)
        names = ["step_time", "memory", "pareto", "shares", "largest_batch", "others"]
        for name in names:
            self.assertEqual((out / f"{name}.png").read_bytes()[:4], b"\x89PNG")
        text = (out / "index.html").read_text()
        tags = Tags(text).all
        links = [attributes.get(name) for _, attributes in tags for name in ("src", "srcset", "href") if name in attributes]
        self.assertEqual(len(links), 4 * len(names))  # wide and narrow, light and dark
        self.assertTrue(all(link.startswith("data:image/svg+xml;base64,") for link in links))
        self.assertEqual(sum(tag == "tr" for tag, _ in tags), 1 + len(cases))
        self.assertIn("Fast &lt;CPU&gt;", text)
        self.assertIn("&lt;impossible&gt; &amp; more", text)
        self.assertIn("2.11.0", text)

    def test_the_front_has_what_nothing_beats(self):
        cases = self.read([case(milliseconds=10, peak=10, layers=1), case(milliseconds=20, peak=20, layers=2), case(milliseconds=5, peak=30, layers=3),
                           case(milliseconds=40, peak=5, layers=4), case(milliseconds=10, peak=11, layers=5)])
        self.assertEqual([each.layers for each in plots.front_of(cases)], [4, 1, 3])

    def test_each_model_has_a_front_of_its_own(self):
        cases = self.read([case(milliseconds=10, peak=10), case(model="mlp", milliseconds=20, peak=20), case(model="mlp", milliseconds=30, peak=30)])
        self.assertEqual([[each.model for each in front] for front in plots.fronts_of(cases)], [["gpt"], ["mlp"]])

    def test_cases_of_two_files_are_told_apart(self):
        files = [results.read(self.write(content_of([case()]), name)) for name in ("old.json", "new.json")]
        cases = [each for file in files for each in file.cases]
        self.assertEqual([plots.Labels(cases).of(each) for each in cases], ["full, old", "full, new"])
        text = page.render(files, [])
        self.assertIn('data-value="old"', text)
        self.assertIn('data-value="new"', text)

    def test_files_of_one_name_are_told_apart_by_their_folders(self):
        files = []
        for name in ("before/bench.json", "after/bench.json", "other.json"):
            (self.folder / name).parent.mkdir(exist_ok=True)
            files.append(self.write(content_of([case()]), name))
        cases = [each for file in results.read_all(files) for each in file.cases]
        self.assertEqual([each.file for each in cases], ["before/bench.json", "after/bench.json", "other"])
        self.assertEqual([plots.Labels(cases).of(each) for each in cases], ["full, before/bench.json", "full, after/bench.json", "full, other"])
        with self.assertRaisesRegex(results.Failure, "is named twice"):
            results.read_all([files[2], files[0].parent / ".." / "other.json"])

    def test_cases_that_nothing_tells_apart_are_numbered(self):
        cases = self.read([case(milliseconds=1), case(milliseconds=2), case(ranks=2)])
        self.assertEqual([plots.Labels(cases).of(each) for each in cases], ["full (1)", "full (2)", "full"])
        figure = plots.Figure()
        plots.bars(cases, figure, True, lambda each: each.milliseconds, "ms")
        self.assertEqual(sorted(bar.get_width() for bar in figure.axes[0].patches), [1, 2, 10])

    def test_long_names_are_wrapped_where_there_is_little_room(self):
        name = "encoder, hierarchical, per-parameter, sequence 64"
        self.assertEqual(plots.wrapped([name], wide=True), [name])
        self.assertEqual(plots.wrapped([name], wide=False), ["encoder,\nhierarchical, per-\nparameter, sequence\n64"])

    def test_the_largest_batch_is_of_cases_that_differ_in_nothing_else(self):
        cases = [case(batch=batch) for batch in (1, 4, 2)] + [case("does not fit", batch=8), case(batch=16, strategy="zero-2"),
                                                             case("does not fit", batch=1, strategy="no-shard")]
        cases += [case(batch=batch, strategy="hybrid", memory_limit_mb=40) for batch in (1, 2)]
        self.assertEqual({each.strategy: each.batch for each in plots.largest_batches(self.read(cases))}, {"full": 4, "no-shard": 0, "hybrid": 2})

    def test_the_largest_batch_is_of_cases_of_one_file(self):
        files = [self.write(content_of([case(batch=batch, memory_limit_mb=40)]), name) for name, batch in (("old.json", 2), ("new.json", 8))]
        cases = [each for file in results.read_all(files) for each in file.cases]
        self.assertEqual([(each.file, each.batch) for each in plots.largest_batches(cases)], [("old", 2), ("new", 8)])

    def test_shares_are_of_the_whole_step(self):
        only, = self.read([case()])
        self.assertEqual(plots.shares_of(only), {"forward and backward": 7.0, "waiting for gathers and reductions": 1.0, "clipping and optimizer": 2.0})

    def test_labels_say_what_differs(self):
        cases = self.read([case(), case(layout="per-parameter"), case(recompute=True)])
        self.assertEqual([plots.Labels(cases).of(each) for each in cases], ["full, ragged", "full, per-parameter", "full, ragged, recompute"])
        cases = self.read([case(), case(steps=20)])
        self.assertEqual([plots.Labels(cases).of(each) for each in cases], ["full, steps 10", "full, steps 20"])

    def test_what_else_was_measured_says_what_differs(self):
        cases = self.read([case(measure="redistribution", width=width, transport=transport) for width in (512, 1024) for transport in ("shared_memory", "gloo")])
        self.assertEqual([name for name, _ in plots.named_others(cases)], ["R to S(0), gloo, width 1024, 1", "R to S(0), gloo, width 512, 1",
                                                                           "R to S(0), shared_memory, width 1024, 1", "R to S(0), shared_memory, width 512, 1"])
        cases = self.read([case(measure="save"), case(measure="save", layout="per-parameter"), case(measure="load")])
        self.assertEqual([name for name, _ in plots.named_others(cases)], ["load, ragged, 1", "save, per-parameter, 1", "save, ragged, 1"])

    def test_results_without_one_that_worked_have_a_table(self):
        file = results.read(self.write(content_of([case("died")])))
        drawn = plots.all_plots(file.cases)
        self.assertEqual(drawn, [])
        self.assertIn("died", page.render([file], drawn))

    def test_bad_input(self):
        good = content_of([case()])

        def changed(change):
            content = copy.deepcopy(good)
            change(content)
            return content
        bad = [(changed(lambda c: c.update(version=2)), "its version is 2, but this tessera-report reads 1"),
               (changed(lambda c: c.update(format="other")), "no results of tessera-bench"), ("[]", "no results of tessera-bench"),
               (json.dumps(good)[:-30], "no whole JSON"), ("", "no whole JSON"), (changed(lambda c: c.update(results=[])), "it has no results"),
               (changed(lambda c: c.pop("machine")), "it does not say its machine"),
               (changed(lambda c: c["results"][0].update(status="fine")), "result 0: its status is 'fine'"),
               (changed(lambda c: c["results"][0]["settings"].update(ranks="2")), "result 0: its setting ranks is '2'"),
               (changed(lambda c: c["results"][0].pop("measured")), "result 0 has no times"), (200000 * "[", "no whole JSON"),
               (changed(lambda c: c["results"][0]["settings"].update(ranks=-1)), "result 0: its setting ranks is -1"),
               (changed(lambda c: c["results"][0]["measured"].update(sent={"all_gather": 3})), "does not say what was sent"),
               (changed(lambda c: c["results"][0]["measured"].update(parts=[1])), "its parts are no times"),
               (changed(lambda c: c["results"][0]["measured"]["milliseconds"].update(p50=0)), "took no time"),
               *((changed(lambda c: c["results"][0]["measured"].update({name: value})), f"its {name} is")
                 for name in ("peak_bytes", "explained_peak_bytes") for value in (math.nan, -1, 10**400, "a", None)),
               (changed(lambda c: c["results"][0]["measured"].update(peak_bytes=None)), "result 0: its peak_bytes is None"),
               (changed(lambda c: c["results"][0]["measured"]["milliseconds"].update(p50="x")), "result 0: a time is no number")]
        for content, part in bad:
            with self.subTest(part), self.assertRaises(results.Failure) as caught:
                results.read(self.write(content))
            self.assertIn(part, str(caught.exception))
            self.assertIn("results.json", str(caught.exception))

    def test_the_command_says_what_is_wrong(self):
        good = self.write(content_of([case()]))
        for arguments, part in (([self.folder / "none.json"], "none.json: No such file or directory"), ([good, "--out", "/proc/self/none"], "/proc/self/none")):
            done = subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, timeout=300)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertTrue(done.stderr.startswith("tessera-report: "), done.stderr)
            self.assertIn(part, done.stderr)


if __name__ == "__main__":
    unittest.main()
