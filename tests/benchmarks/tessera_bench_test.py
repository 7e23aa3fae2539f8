"""tessera-bench as a user runs it: what it measures, what becomes of cases that fail, and of a matrix that is killed. The arguments are the
program's path, and unittest's."""
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM = pathlib.Path(sys.argv[1]).resolve()
EXECUTED = os.environ.get("TESSERA_TEST_FORKED", PROGRAM)
FULL = os.environ.get("TESSERA_TEST_FULL") == "1"
DRAW = random.Random(os.environ.get("TESSERA_TEST_SEED", "1"))  # of the cases that are not all run
TIMEOUT = 1800 if FULL else 240
TINY = {"model": "mlp", "layers": 2, "width": 16, "batch": 2, "sequence": 4, "steps": 2}


def children_of(pid):
    return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class TesseraBenchTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.out = self.folder / "out.json"

    def command(self, matrix=None, out=None):
        if matrix is not None:
            (self.folder / "matrix.json").write_text(matrix if isinstance(matrix, str) else json.dumps(matrix))
        return [PROGRAM, "--matrix", self.folder / "matrix.json", "--out", out or self.out]

    def run_matrix(self, matrix, out=None):
        return subprocess.run(self.command(matrix, out), capture_output=True, text=True, timeout=TIMEOUT)

    def results(self):
        return json.loads(self.out.read_text())["results"]

    def only_result(self, **settings):
        limit = settings.pop("time_limit_seconds", 60)
        self.run_matrix({"cases": [{**TINY, **settings}], "time_limit_seconds": limit})
        results = self.results()
        self.assertEqual(len(results), 1)
        return results[0]

    def assert_error(self, matrix, *parts, out=None):
        done = self.run_matrix(matrix, out)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        for part in parts:
            self.assertIn(part, done.stderr)

    def test_each_measure_has_its_figures(self):
        measures = ["step", "gather", "reduction", "redistribution", "optimizer", "state_dict", "save", "load"]
        done = self.run_matrix({"common": {**TINY, "ranks": 2}, "product": {"measure": measures}})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertNotIn("WARNING", done.stdout + done.stderr)
        results = {result["settings"]["measure"]: result for result in self.results()}
        self.assertEqual(list(results), measures)
        for result in results.values():
            measured = result["measured"]
            times = measured["milliseconds"]
            self.assertLessEqual(0, times["min"])
            self.assertTrue(times["min"] <= times["p50"] <= times["p90"] <= times["p99"] <= times["max"], times)
            self.assertTrue(measured["verified"])
        step = results["step"]["measured"]
        self.assertEqual(set(step["parts"]), {"forward", "backward", "clip", "optimizer"})
        self.assertGreater(step["items_per_second"], 0)
        self.assertEqual(step["sent"]["reduce_scatter"]["calls"], 2)
        self.assertEqual(results["gather"]["measured"]["sent"]["all_gather"]["calls"], 2)
        self.assertEqual(results["redistribution"]["measured"]["sent"], {})  # from whole to parts
        self.assertEqual(results["optimizer"]["measured"]["sent"], {})

    def test_what_is_redistributed_is_as_large_on_any_number_of_ranks(self):
        common = {**TINY, "measure": "redistribution", "steps": 1}
        done = self.run_matrix({"common": common, "product": {"ranks": [2, 4], "transition": ["S(0) to R", "S(1) to R", "P to R"]}})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for result in self.results():
            sent = [count["bytes"] for count in result["measured"]["sent"].values()]
            self.assertEqual(sent, [4 * TINY["width"] ** 2], result["settings"])

    def test_explain_knows_the_peak_of_memory(self):
        """Of 6 models under all strategies in the full run, of few otherwise: within 3 % of what was allocated."""
        models = ["gpt", "mlp", "resnet", "moe", "dlrm", "encoder"] if FULL else ["gpt"]
        strategies = ["no-shard", "zero-1", "zero-2", "full", "hybrid", "hierarchical"] if FULL else ["zero-2", "full"]
        common = {"layers": 4, "width": 256, "batch": 1, "sequence": 8, "steps": 1}
        done = self.run_matrix({"common": common, "product": {"ranks": [2, 4] if FULL else [2], "model": models, "strategy": strategies,
                                                              "layout": ["ragged", "per-parameter"] if FULL else ["ragged"]}})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for result in self.results():
            measured = result["measured"]
            with self.subTest(**{name: result["settings"][name] for name in ("model", "strategy", "layout", "ranks")}):
                self.assertLess(abs(measured["explained_peak_bytes"] / measured["peak_bytes"] - 1), 0.03)

    def test_the_state_is_what_a_rank_holds(self):
        """In bytes of one copy of the parameters, with their gradients and AdamW's two moments."""
        ranks, width = 4, 128
        common = {**TINY, "width": width, "ranks": ranks, "measure": "optimizer", "steps": 1}
        expected = {"no-shard": 4, "zero-1": 1 + 4 / ranks, "zero-2": 1 + 4 / ranks, "full": 4 / ranks, "hybrid": 8 / ranks,
                    "hierarchical": 1 / 2 + 4 / ranks}  # the part inside a row of the mesh, 2 x 2, is kept
        layouts = ["ragged", "per-parameter"] if FULL else [DRAW.choice(["ragged", "per-parameter"])]
        done = self.run_matrix({"common": common, "product": {"strategy": list(expected), "layout": layouts}})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for result in self.results():
            settings, measured = result["settings"], result["measured"]
            with self.subTest(strategy=settings["strategy"], layout=settings["layout"]):
                copies = measured["state_bytes"] / (4 * measured["parameters"])
                self.assertAlmostEqual(copies, expected[settings["strategy"]], delta=0.05)

    def test_flags_are_lists_of_cases(self):
        done = subprocess.run([PROGRAM, "--model=mlp", "--layers", "1", "--width", "16", "--ranks", "1,2", "--strategy", "zero-1,full", "--steps", "1",
                               f"--out={self.out}"], capture_output=True, text=True, timeout=TIMEOUT)
        self.assertEqual(done.returncode, 0, done.stderr)
        told = [(result["settings"]["ranks"], result["settings"]["strategy"], result["status"]) for result in self.results()]
        self.assertEqual(told, [(1, "zero-1", "ok"), (1, "full", "ok"), (2, "zero-1", "ok"), (2, "full", "ok")])

    def test_an_impossible_case_is_a_row(self):
        result = self.only_result(ranks=3, strategy="hybrid")
        self.assertEqual(result["status"], "impossible")
        self.assertIn("3 ranks needs a mesh", result["message"])

    def test_a_case_that_runs_out_of_memory_does_not_fit(self):
        result = self.only_result(width=800000)
        self.assertEqual(result["status"], "does not fit", result)
        self.out.unlink()
        result = self.only_result(width=512, memory_limit_mb=1)
        self.assertEqual(result["status"], "does not fit", result)

    def test_a_redistribution_has_a_memory_limit(self):
        result = self.only_result(measure="redistribution", width=1024, memory_limit_mb=1)
        self.assertEqual((result["status"], result["settings"]["memory_limit_mb"]), ("does not fit", 1), result)

    def test_the_memory_of_a_process_can_be_limited(self):
        """By a control group, where one can be made; else by the system's limit of its data."""
        common = {**TINY, "ranks": 2, "limit": "process", "verify": False, "layers": 4, "steps": 1}
        cases = [{"width": 16, "memory_limit_mb": 200}, {"width": 1024, "memory_limit_mb": 120}]
        self.run_matrix({"common": common, "cases": cases})
        fits, fails = self.results()
        self.assertEqual(fits["status"], "ok", fits)
        self.assertIn(fits["measured"]["limited_by"], ("control group", "data segment"))
        self.assertLess(fits["measured"].get("group_peak_bytes", 0), 200e6)
        self.assertEqual(fails["status"], "does not fit", fails)
        self.assertEqual([path for path in pathlib.Path("/sys/fs/cgroup").glob("**/tessera-bench-*")], [])

    @unittest.skipIf(subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode, "this process may not make namespaces")
    def test_without_control_groups_the_data_segment_is_limited(self):
        common = {**TINY, "ranks": 2, "limit": "process", "verify": False, "layers": 4, "steps": 1}
        cases = [{"width": 16, "memory_limit_mb": 400}, {"width": 1024, "memory_limit_mb": 120}]
        command = [EXECUTED, *self.command({"common": common, "cases": cases})[1:]]
        without = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o ro none /sys/fs/cgroup && exec "$@"', "sh"]
        subprocess.run([*without, *command], capture_output=True, text=True, timeout=TIMEOUT)
        fits, fails = self.results()
        self.assertEqual((fits["status"], fits.get("measured", {}).get("limited_by")), ("ok", "data segment"), fits)
        self.assertNotIn("group_peak_bytes", fits["measured"])
        self.assertEqual(fails["status"], "does not fit", fails)

    def test_strategies_have_the_same_losses_without_the_unsharded_model(self):
        cases = [{"strategy": strategy, "recompute": recompute, "offload": offload} for strategy in ("no-shard", "zero-1", "zero-2", "full")
                 for recompute in (False, True) for offload in ("none", "files")]
        if not FULL:
            cases = [cases[0], *DRAW.sample(cases[1:], 5)]
        common = {**TINY, "model": "gpt", "width": 32, "ranks": 2, "verify": False, "steps": 3}
        done = self.run_matrix({"common": common, "cases": cases})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        expected, *others = [result["measured"]["losses"] for result in self.results()]
        self.assertEqual((len(expected), len(others)), (3, len(cases) - 1))
        for losses in others:
            for loss, other in zip(expected, losses):
                self.assertAlmostEqual(loss, other, delta=1e-5)

    def test_a_step_can_be_predicted_before_it_runs(self):
        """Within 3 %, as the prediction from the case's own activations; how many rows fit is what their predicted peaks say."""
        common = {"layers": 4, "width": 256, "batch": 4, "sequence": 8, "steps": 1, "ranks": 2}
        product = {"measure": ["step", "explain"], "strategy": ["zero-2", "full"], "memory_limit_mb": [0]}
        limited = [{"measure": "explain", "strategy": "full", "batch": 100, "memory_limit_mb": 60}]
        done = self.run_matrix({"common": common, "product": product, "cases": limited})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        results = {(result["settings"]["measure"], result["settings"]["strategy"], result["settings"]["batch"]): result["measured"] for result in self.results()}
        for strategy in product["strategy"]:
            predicted = results["explain", strategy, 4]["explained_peak_bytes"]
            self.assertLess(abs(predicted / results["step", strategy, 4]["peak_bytes"] - 1), 0.03, strategy)
        rows = results["explain", "full", 100]["explained_largest_batch"]
        self.assertTrue(4 < rows < 100, rows)
        peaks = [{"measure": "explain", "strategy": "full", "batch": batch} for batch in (rows, rows + 1)]
        self.out.unlink()
        self.run_matrix({"common": common, "cases": peaks})
        fits, fails = [result["measured"]["explained_peak_bytes"] for result in self.results()]
        self.assertTrue(fits <= 60e6 < fails, (fits, fails))

    def test_a_prediction_is_of_what_was_measured_alone(self):
        """The activations are those of a forward in fp32 that keeps them all."""
        cases = [{**TINY, "model": "gpt", "width": 32, **own} for own in ({}, {"precision": "bf16"}, {"recompute": True})]
        self.assertEqual(self.run_matrix({"cases": cases}).returncode, 0)
        self.assertEqual(["explained_peak_bytes" in result["measured"] for result in self.results()], [True, False, False])

    def test_the_median_of_two_runs_lies_between_them(self):
        times = self.only_result(steps=2)["measured"]["milliseconds"]
        self.assertAlmostEqual(times["p50"], (times["min"] + times["max"]) / 2)

    def test_a_case_ends_at_its_time_limit(self):
        result = self.only_result(ranks=2, steps=1000000, time_limit_seconds=5)
        self.assertEqual((result["status"], result["message"]), ("time limit", "killed after 5 seconds"))

    def test_goes_on_after_a_case_that_dies(self):
        cases = [{**TINY, "ranks": 2, "steps": 1000000}, {**TINY, "ranks": 1}]
        with subprocess.Popen([EXECUTED, *self.command({"cases": cases})[1:]], stdout=subprocess.PIPE, text=True) as bench:
            ranks = []
            end = time.monotonic() + TIMEOUT
            while len(ranks) < 2 and time.monotonic() < end:
                try:
                    ranks = [rank for case in children_of(bench.pid) for rank in children_of(case)]
                except OSError:  # it has just ended
                    pass
            os.kill(ranks[1], signal.SIGKILL)
            bench.communicate(timeout=TIMEOUT)
        self.assertEqual([result["status"] for result in self.results()], ["died", "ok"], self.results())

    def test_bad_matrices(self):
        self.assert_error("{", "matrix.json: no JSON", "line 1, column 2")
        self.assert_error({"cases": [{"strategy": "zero-9"}]}, "strategy is 'zero-9', but must be one of: no-shard, ")
        self.assert_error('{"cases": ' + 200000 * "[", "matrix.json: it is nested too deeply")
        self.assert_error('{"cases": [{"width": 1e400}]}', "matrix.json: no JSON")
        self.assert_error({"cases": [{"ranks": 2**32 + 1}]}, "ranks is 4294967297, but must be from 0 to 1000000000")
        self.assert_error({"cases": [{}], "time_limit_seconds": 1e300}, "time_limit_seconds is 1e+300, but must be positive, and at most 1000000")
        self.assert_error({"cases": [{"ranks": 0}]}, "ranks is 0, but must be from 1 to 64")
        self.assert_error({"cases": [{"reshard": "no"}]}, "reshard is 'no', but must be auto, ")
        self.assert_error({"cases": [{"reshard": "99999999999"}]}, "reshard is '99999999999', but must be auto, true, false or a number of ranks from 1 to 64")
        self.assert_error([], "a matrix must be an object")
        self.assert_error({"case": []}, "unknown key 'case'")
        self.assert_error({"cases": []}, "no cases")
        self.assert_error({"cases": [{"strategie": "full"}]}, "unknown key 'strategie' of a case; the nearest is 'strategy'")
        self.assert_error({"cases": [{"width": "64"}]}, 'width is "64", but must be an integer')
        self.assert_error({"product": {"ranks": 2}}, "ranks is 2, but must be a list of values")
        self.assert_error({"cases": [1]}, "a case is 1, but must be an object")
        self.assert_error({"product": []}, "product is [], but must be an object")
        self.assert_error({"cases": [{}], "time_limit_seconds": 0}, "time_limit_seconds is 0, but must be positive")
        self.assert_error({"cases": [{}]}, "/proc/self/none", out="/proc/self/none/out.json")
        self.assertFalse(self.out.exists())

    def test_results_of_others_are_left_alone(self):
        impossible = {"cases": [{"ranks": 1, "strategy": "hybrid"}]}
        self.out.write_text('{"format": "tessera-be')
        self.assert_error(impossible, "out.json: no results of tessera-bench; choose another file")
        self.assertEqual(self.out.read_text(), '{"format": "tessera-be')
        for results in ([{}], 5, "x", {"a": 1}, [1], [None], None, [{"settings": {}, "status": "ok"}]):
            self.out.write_text(json.dumps({"format": "tessera-bench", "results": results}))
            self.assert_error(impossible, "out.json: no results of tessera-bench; choose another file")
        self.out.unlink()
        self.run_matrix(impossible)
        content = json.loads(self.out.read_text())
        for key, value in (("version", 2), ("program", "another"), ("machine", {"cpu": "another"})):
            self.out.write_text(json.dumps({**content, key: value}))
            self.assert_error(impossible, f"its {key} is ")

    def test_help_names_each_setting(self):
        for flag in ("--help", "-h"):
            done = subprocess.run([PROGRAM, flag], capture_output=True, text=True, timeout=TIMEOUT)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            for part in ("--strategy         \"full\"", "--memory_limit_mb  0", "redistribution", "R to S(0)"):
                self.assertIn(part, done.stdout)

    def test_offloaded_states_are_measured(self):
        done = self.run_matrix({"common": {**TINY, "ranks": 2}, "product": {"offload": ["host", "files"], "recompute": [False, True]}})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual([result["status"] for result in self.results()], 4 * ["ok"])

    def test_what_was_measured_before_is_counted(self):
        matrix = {"cases": [{**TINY, "ranks": 1, "memory_limit_mb": 1, "width": 512}, {"ranks": 1, "strategy": "hybrid"}]}
        self.assertEqual(self.run_matrix(matrix).returncode, 1)
        again = self.run_matrix(matrix)
        self.assertEqual((again.returncode, again.stdout), (1, f"2 of 2 cases were in {self.out} before\n"))

    def test_flags(self):
        for flags, part in ((["--width"], "--width needs a value"), (["--widht", "1"], "no flag --widht (see --help); the nearest is --width"), (["width"], "belongs to no flag"),
                            (["--ranks", "two"], "--ranks is 'two', but must be a number"), (["--time-limit", "abc"], "--time-limit is 'abc', but must be"), (["--out="], "--out names no file"), (["--matrix="], "cannot be read")):
            done = subprocess.run([PROGRAM, *flags], capture_output=True, text=True, timeout=TIMEOUT)
            self.assertEqual(done.returncode, 1)
            self.assertIn(part, done.stderr)

    def test_a_killed_matrix_goes_on_and_has_each_result_once(self):
        """40 settings, killed at random moments: in the full run 20 times, with cases that are all measured."""
        measured = [{**TINY, "ranks": 1, "layers": 1, "steps": 1, "batch": batch} for batch in range(1, 41 if FULL else 4)]
        quick = [{"ranks": 1, "strategy": "hybrid", "batch": batch} for batch in range(1, 41 - len(measured))]
        cases = [case for pair in zip(measured, quick) for case in pair] + measured[len(quick):] + quick[len(measured):]
        draw = random.Random(os.environ.get("TESSERA_TEST_SEED", "1"))
        command, kills = self.command({"cases": cases}), 0
        seconds = 60 if FULL else 2
        for _ in range(20 if FULL else 3):
            bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            try:
                bench.wait(draw.uniform(0, seconds / 10))
            except subprocess.TimeoutExpired:
                bench.kill()
                kills += 1
            bench.wait()
            if self.out.exists():
                json.loads(self.out.read_text())  # whole at any moment
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        settings = [json.dumps(result["settings"], sort_keys=True) for result in self.results()]
        self.assertEqual((len(settings), len(set(settings))), (40, 40))
        self.assertEqual({result["status"] for result in self.results()}, {"ok", "impossible"} if quick else {"ok"})
        self.assertGreater(kills, 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
