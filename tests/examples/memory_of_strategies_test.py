"""memory_of_strategies prints what docs/strategies.md shows, and what its formulas say.

Usage: memory_of_strategies_test.py PROGRAM SOURCES   (the project's root)
"""
import pathlib
import subprocess
import sys
import unittest

PROGRAM, SOURCES = pathlib.Path(sys.argv.pop(1)).resolve(), pathlib.Path(sys.argv.pop(1)).resolve()


def run(*arguments):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=120)


def rows(*arguments):
    """{strategy: its numbers}, and the parameters in GiB."""
    first, _, *lines = run(*arguments).stdout.splitlines()
    table = {words[0]: [float(word) for word in words[1:8]] for words in map(str.split, lines)}
    return table, 4e6 * float(first.split()[0]) / 2**30


class MemoryOfStrategies(unittest.TestCase):
    def test_the_page_shows_what_it_prints(self):
        done = run()
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("```\n" + done.stdout + "```\n", (SOURCES / "docs/strategies.md").read_text())

    def test_the_formulas_hold(self):
        for ranks, precision, width in (2, [], 1), (64, ["--bf16"], 0.5):
            table, whole = rows("--ranks", str(ranks), *precision)
            inner = ranks / 2
            split = {"no-shard": 1, "zero-1": ranks, "zero-2": ranks, "full": ranks, "hybrid": inner, "hierarchical": ranks}
            self.assertEqual(list(table), list(split))
            for name, (parameters, optimizer, gradients, unsharded, _, _, peak) in table.items():
                with self.subTest(name, ranks=ranks):
                    kept = width * whole / inner if name == "hierarchical" else 0
                    self.assertAlmostEqual(parameters, whole / split[name] + kept, delta=0.02)
                    self.assertAlmostEqual(optimizer, 2 * whole / split[name], delta=0.03)
                    self.assertLessEqual(gradients, whole / split[name] + 0.02)
                    if name.startswith("zero"):
                        self.assertAlmostEqual(unsharded, width * whole, delta=0.03)
                    self.assertGreaterEqual(peak, parameters + optimizer)

    def test_a_wrong_argument_is_named(self):
        for arguments, text in (["--ranks", "3"], "--ranks is '3', but must be an even number"), (["--rank", "2"], "the argument --rank"):
            done = run(*arguments)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn(text, done.stderr)


unittest.main()
