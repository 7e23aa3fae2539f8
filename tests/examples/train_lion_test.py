"""train_lion goes on from its checkpoint on other ranks, with the losses of one rank that was not interrupted.

Usage: train_lion_test.py PROGRAM
"""
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()


def losses(folder, ranks):
    """What one run in this folder prints: {step of training: loss}."""
    result = subprocess.run([PROGRAM, "--ranks", str(ranks)], cwd=folder, capture_output=True, text=True, timeout=120)
    if result.returncode != 0:
        raise AssertionError(f"on {ranks} ranks it ended with {result.returncode}: {result.stderr}")
    return {int(step): float(loss) for step, loss in re.findall(r"^step +(\d+)  loss ([\d.]+)$", result.stdout, re.MULTILINE)}


class TrainLion(unittest.TestCase):
    def test_a_run_goes_on_on_other_ranks(self):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as several:
            expected = losses(one, 1) | losses(one, 1)
            found = losses(several, 4) | losses(several, 2)
        self.assertEqual(list(expected), [10, 20, 30, 40, 50])
        self.assertEqual(expected, found)
        self.assertLess(expected[50], expected[10] / 2)


unittest.main()
