"""Trains a step that AOTInductor compiled, as a user does, and compares it with the same training in Python.

The arguments are the program's path and unittest's.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import safetensors.torch
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "exported_step"
sys.path.insert(0, str(EXAMPLE))
import export_step

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
BOUND = 1e-5
STEPS = 20


def train(start, ranks):
    """The losses and the weights of the whole batch in one process."""
    step = export_step.Step(export_step.Model())
    step.load_state_dict({name: tensor for name, tensor in start.items() if name not in ("x", "y")})
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number in range(STEPS):
        rows = torch.arange(number * ranks * export_step.ROWS, (number + 1) * ranks * export_step.ROWS) % len(start["x"])
        optimizer.zero_grad()
        loss = step(start["x"][rows], start["y"][rows])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(step.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, step.state_dict()


class ExportedStepTest(unittest.TestCase):
    def test_a_compiled_step_trains_as_in_python(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
            export_step.compile_step(folder)
            start = torch.load(folder / "start.pt")
            for ranks in 1, 3:
                expected, weights = train(start, ranks)
                done = subprocess.run([PROGRAM, f"--ranks={ranks}", f"--folder={folder}", f"--steps={STEPS}"],
                                      capture_output=True, text=True, timeout=120)
                self.assertEqual(done.returncode, 0, done.stderr)
                losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)$", done.stdout, re.MULTILINE)]
                self.assertEqual(len(losses), STEPS)
                for got, wanted in zip(losses, expected):
                    self.assertLessEqual(abs(got - wanted), BOUND)
                trained = safetensors.torch.load_file(folder / "trained" / "model.safetensors")
                self.assertEqual(trained.keys(), weights.keys())
                for key, tensor in weights.items():
                    self.assertLessEqual((trained[key] - tensor).abs().max().item(), BOUND, key)


unittest.main()
