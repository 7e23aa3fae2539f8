"""The command of the study with tiny models: what fits, what is refused, and what it writes.

Usage: study_test.py STUDY BUILD
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom

STUDY, BUILD = (pathlib.Path(sys.argv.pop(1)).resolve() for _ in range(2))
sys.path.insert(0, str(STUDY.parent))
sys.dont_write_bytecode = True
from memory_study import report, search  # noqa: E402

METHODS = ["no sharding", "ZeRO-3", "ZeRO-3, files, recompute"]
FIGURES = {"peak_bytes", "state_bytes", "process_peak_bytes", "items_per_second", "epoch_seconds", "step_seconds", "explained_peak_bytes", "losses",
           "limited_by", "predicted_largest_batch", "planned_peak_bytes"}


class StudyTest(unittest.TestCase):
    def run_study(self, *arguments):
        return subprocess.run([STUDY, "--quick", "--build", BUILD, "--out", self.folder / "out", "--text", self.folder / "text", *arguments],
                              capture_output=True, text=True, timeout=500)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "text").write_text("A rank holds a part, and all of them the whole. " * 100)

    def test_what_fits_is_measured_and_what_does_not_is_refused(self):
        (self.folder / "images").mkdir()
        page = self.folder / "page.md"
        page.write_text("Before.\n\n<!-- study: a -->\n<!-- end -->\n\n<!-- study: b -->\nold\n<!-- end -->\n\nAfter.\n")
        done = self.run_study("--methods", ";".join(METHODS), "--steps", "1", "--page", page)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        content = json.loads((self.folder / "out/study.json").read_text())
        self.assertEqual((content["format"], content["version"], content["ranks"], content["text_bytes"]), ("tessera-study", 1, 2, 4800))
        small, large = content["studies"]
        for row in small["rows"]:
            self.assertEqual((row["method"], row["largest_batch"]), (row["method"], 2), row)
            self.assertLessEqual(FIGURES, set(row), row)
            self.assertAlmostEqual(row["epoch_seconds"], content["tokens_an_epoch"] / row["items_per_second"])
            self.assertAlmostEqual(row["losses"][0], small["rows"][0]["losses"][0], delta=1e-4)
        unsharded, *_, files = large["rows"]
        self.assertEqual(unsharded["largest_batch"], 0, unsharded)
        self.assertEqual((unsharded["fails"]["batch"], unsharded["fails"]["status"]), (1, "does not fit"), unsharded)
        self.assertEqual(files["largest_batch"], 1, files)
        self.check_page(page.read_text())
        again = self.run_study("--methods", ";".join(METHODS), "--steps", "1")
        self.assertEqual(json.loads((self.folder / "out/study.json").read_text()), content, again.stderr)

    def check_page(self, text):
        self.assertTrue(text.startswith("Before.\n\n<!-- study: a -->\n| method |") and text.endswith("\n<!-- end -->\n\nAfter.\n"), text)
        self.assertNotIn("old", text)
        self.assertIn("| no sharding | does not fit | 0 | 1: does not fit |", text)
        for place in (self.folder / "images", self.folder / "out"):
            pictures = sorted(path.name for path in place.glob("*.svg"))
            self.assertEqual(pictures, [f"study_{study}_{what}.svg" for study in "ab" for what in ("batch", "epoch", "memory")])
            for name in pictures:
                xml.dom.minidom.parse(str(place / name))

    def test_the_largest_batch_is_found_from_any_guess(self):
        for most in (1, 2, 7, 64):
            for true in range(most + 1):
                for guess in range(-1, most + 2):
                    tried = []
                    found = search.largest(lambda rows: tried.append(rows) or rows <= true, most, guess)
                    self.assertEqual(found, true)
                    self.assertEqual(len(tried), len(set(tried)))
                    self.assertTrue(all(1 <= rows <= most for rows in tried))

    def test_a_page_without_a_place_for_a_table_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "the page has 0 places for the table of study a, but must have 1"):
            report.put_into("text", {"a": "| table |"})

    def test_bad_arguments(self):
        for arguments, part in ((["--studies", "c"], "there is no study 'c'; there are: a, b"), (["--methods", "zero"], "there is no method 'zero'; there are: no sharding; "),
                                (["--limit", "0"], "limit_mb is 0, but must be at least 1"), (["--text", self.folder / "none"], "there is no text "),
                                (["--build", self.folder], "build it with `cmake --build --preset release --target study_model`")):
            done = self.run_study(*arguments)
            self.assertEqual((done.returncode, done.stdout), (1, ""), arguments)
            self.assertIn(part, done.stderr)


if __name__ == "__main__":
    unittest.main()
