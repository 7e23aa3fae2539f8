"""The programs of docs/tutorial.md print one program's losses on any number of ranks, and the tutorial shows these programs.

Usage: tutorial_test.py FOLDER SOURCES   (where the programs are, and the project's root)
"""
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

FOLDER, SOURCES = pathlib.Path(sys.argv.pop(1)).resolve(), pathlib.Path(sys.argv.pop(1)).resolve()


def losses(step, *arguments, cwd=None):
    """What a step's program prints: {step of training: loss}."""
    result = subprocess.run([FOLDER / f"tutorial_{step}", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)
    if result.returncode != 0:
        raise AssertionError(f"{step} {arguments} ended with {result.returncode}: {result.stderr}")
    return {int(number): float(loss) for number, loss in re.findall(r"^step +(\d+)  loss ([\d.]+)$", result.stdout, re.MULTILINE)}


class Tutorial(unittest.TestCase):
    def assert_same(self, expected, found):
        self.assertEqual(list(expected), list(found))
        for step, loss in expected.items():
            self.assertAlmostEqual(loss, found[step], delta=2e-4, msg=f"step {step}")

    def test_ranks_and_shards_change_no_loss(self):
        alone = losses("step1_one_process")
        self.assertEqual(list(alone), [10, 20, 30, 40, 50])
        for step, ranks in (("step2_ranks", "2"), ("step3_sharded", "1"), ("step3_sharded", "4")):
            with self.subTest(step=step, ranks=ranks):
                self.assert_same(alone, losses(step, "--ranks", ranks))

    def test_a_run_goes_on_from_a_checkpoint_on_other_ranks(self):
        alone = losses("step1_one_process")
        with tempfile.TemporaryDirectory() as folder:
            first = losses("step4_checkpoints", "--ranks", "4", cwd=folder)
            second = losses("step4_checkpoints", "--ranks", "2", cwd=folder)
        self.assert_same(alone, first | second)

    def test_a_large_model_learns(self):
        found = losses("step5_large_models", "--ranks", "4")
        self.assertLess(found[50], found[10] / 2)

    def test_a_batch_that_cannot_be_shared_is_an_error(self):
        with self.assertRaisesRegex(AssertionError, "the batch of 64 rows cannot be shared evenly by 3 ranks"):
            losses("step3_sharded", "--ranks", "3")

    def test_unknown_arguments_are_errors(self):
        for program in ("tutorial_step2_ranks", "getting_started", "train_lion"):
            for arguments in (["--rank", "2"], ["--ranks", "2", "--steps=3"], ["--ranks=2", "3"], ["more", "--ranks", "2"]):
                done = subprocess.run([FOLDER / program, *arguments], capture_output=True, text=True, timeout=120)
                unknown = next(each for each in arguments if each not in ("--ranks", "--ranks=2", "2"))
                self.assertEqual((done.returncode, done.stdout), (1, ""), (program, arguments))
                self.assertIn(f"the argument {unknown} is unknown; usage: ", done.stderr)

    def test_the_tutorial_quotes_the_programs(self):
        folder = SOURCES / "examples/tutorial"
        programs = "\n".join(file.read_text() for file in sorted(folder.glob("*.[ch]*")))
        quotes = re.findall(r"```cpp\n(.*?)```", (SOURCES / "docs/tutorial.md").read_text(), re.DOTALL)
        self.assertGreaterEqual(len(quotes), 5)
        lines = {line.strip() for line in programs.splitlines()}
        for line in (line.strip() for quote in quotes for line in quote.splitlines()):
            self.assertIn(line, lines | {"", "…"}, "docs/tutorial.md shows a line that no program has")


unittest.main()
