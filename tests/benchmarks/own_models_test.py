"""A program's models in the harness of tessera-bench: the example, and what becomes of models that fail.

Usage: own_models_test.py OWN_MODELS BENCH_OWN_MODEL [unittest's arguments]
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM, EXAMPLE = (pathlib.Path(sys.argv.pop(1)).resolve() for _ in range(2))
TIMEOUT = 300


class OwnModelsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name) / "out.json"

    def run_program(self, *arguments, program=PROGRAM):
        return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=TIMEOUT)

    def results(self):
        return json.loads(self.out.read_text())["results"]

    def test_the_example_measures_its_model(self):
        done = self.run_program("--ranks", "2", "--strategy", "no-shard,full", "--layers", "2", "--width", "16", "--steps", "1", "--recompute", "false,true",
                                "--out", self.out, program=EXAMPLE)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("1/4 step model=own", done.stdout)
        results = self.results()
        self.assertEqual([result["settings"]["strategy"] for result in results], ["no-shard", "full", "no-shard", "full"])
        for result in results:
            self.assertEqual((result["status"], result["settings"]["model"], result["measured"]["verified"]), ("ok", "own", True), result)
            self.assertEqual(result["measured"]["parameters"], 2 * (2 * 16 + 16 * 32 + 32 + 32 * 16 + 16))
        for result in results[::2]: # with AdamW's two moments, and the gradients
            self.assertAlmostEqual(result["measured"]["state_bytes"], 16 * result["measured"]["parameters"], delta=256)

    def test_a_call_gives_a_report(self):
        matrix = {"common": {"width": 8, "steps": 1}, "product": {"ranks": [1, 2]}, "cases": [{"ranks": 3, "strategy": "hybrid"}, {"model": "none"}]}
        done = self.run_program("run", json.dumps(matrix), self.out)
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        lines = [line.split() for line in done.stdout.splitlines()]
        self.assertEqual(lines[0][:5], ["measure", "model", "ranks", "strategy", "layout"])
        self.assertEqual([line[6] for line in lines[1:]], ["none"] * 4)
        self.assertEqual([next(word for word in line if word in ("ok", "impossible", "failed")) for line in lines[1:]], ["ok", "ok", "impossible", "failed"])

    def test_models_that_fail_are_rows(self):
        expected = {
            "nothing": ("failed", "model 'nothing': its recipe made no module"),
            "detached": ("failed", "model 'detached': its loss on rank 1 needs no gradient"),
            "matrix": ("failed", "model 'matrix': its loss on rank 1 is of shape [4, 8], but must be one number"),
            "stranger": ("failed", "model 'stranger': block 0 is no module below it"),
            "rows": ("failed", "model 'rows': its batch maker gave 5 rows as tensor 0 on rank 1 in step 0, but 4 were asked for"),
            "later": ("failed", "model 'later': its batch maker gave 1 rows as tensor 1 on rank 1 in step 3, but 4 were asked for"),
            "none": ("failed", "model 'none': its batch maker gave no tensor on rank 1"),
            "throws": ("failed", "no data for rank 1"),
            "dies": ("died", "rank 1"),
            "leaves": ("failed", "rank 1"),
            "works": ("ok", ""),
        }
        done = self.run_program("main", "--model", ",".join(expected), "--ranks", "2", "--strategy", "full", "--width", "8", "--steps", "5", "--out", self.out)
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        results = self.results()
        self.assertEqual(len(results), len(expected))
        for result, (model, (status, message)) in zip(results, expected.items()):
            with self.subTest(model=model):
                self.assertEqual(result["settings"]["model"], model)
                self.assertEqual(result["status"], status, result)
                told = result.get("message", "").replace("rank 0", "rank 1") # whichever of the ranks is first
                self.assertIn(message.replace("gave 5 rows", "gave"), told.replace("gave 5 rows", "gave"))

    def test_models_and_settings_that_cannot_be(self):
        for arguments, part in ((["twice"], "there are two models with the name 'works'"), (["unnamed"], "a model needs a name"),
                                (["empty"], "there is no model to measure"),
                                (["main", "--model", "work"], "model is 'work', but must be one of: works, nothing, "),
                                (["main", "--stratgy", "full"], "no flag --stratgy (see --help); the nearest is --strategy"),
                                (["run", '{"cases": [{"bacth": 1}]}', self.out], "the matrix: unknown key 'bacth' of a case; the nearest is 'batch'"),
                                (["run", '{"cases": [{}], "time_limit_seconds": -1}', self.out], "the matrix: time_limit_seconds is -1"),
                                (["run", "{", self.out], "the matrix: no JSON"), (["run", '{"cases": [{}]}', ""], "the results have no file")):
            done = self.run_program(*arguments)
            self.assertEqual((done.returncode, done.stdout), (1, ""), arguments)
            self.assertIn(part, done.stderr)
        self.assertFalse(self.out.exists())

    def test_results_of_another_program_are_left_alone(self):
        impossible = ["--ranks", "1", "--strategy", "hybrid", "--out", self.out]
        self.assertEqual(self.run_program(*impossible, program=EXAMPLE).returncode, 0)
        done = self.run_program("main", *impossible)
        self.assertEqual(done.returncode, 1)
        self.assertIn('its program is "bench_own_model", but here it is "own_models"', done.stderr)


if __name__ == "__main__":
    unittest.main()
