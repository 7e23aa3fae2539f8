"""Runs finetune_torchscript as a user does: an export is trained as the same file is in Python, and what it saves is loaded there.

The arguments are the program's path and unittest's.
"""
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "finetune_torchscript"
sys.path.insert(0, str(EXAMPLE))
import export_model

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
BOUND = 1e-5
STEPS, ROWS = 20, 12


def buffers_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def set_buffers(model, values):
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def batch(data, step):
    rows = torch.arange(step * ROWS, (step + 1) * ROWS) % len(data["x"])
    return data["x"][rows], data["y"][rows]


def mean_of(buffers):
    return {name: torch.stack([each[name].double() for each in buffers]).mean(0) for name in buffers[0]}


def train(folder, ranks, freezes):
    """The losses, and the model, of one process. Of several ranks, whose batch norms are apart: the gradients of their rows are averaged,
    and each has its running statistics."""
    model = torch.jit.load(folder / "model.pt")
    data = torch.load(folder / "sequences.pt")
    model.train()
    if freezes:
        model.norm.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    buffers = [buffers_of(model) for _ in range(ranks)]
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(data, step)
        total = 0
        for rank, (own_x, own_y) in enumerate(zip(x.chunk(ranks), y.chunk(ranks))):
            set_buffers(model, buffers[rank])
            loss = torch.nn.functional.cross_entropy(model(own_x), own_y) / ranks
            loss.backward()
            buffers[rank] = buffers_of(model)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    set_buffers(model, mean_of(buffers))
    return losses, model


class FinetuneTorchscriptTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_program(self, *flags):
        command = [PROGRAM, f"--folder={self.folder}", f"--steps={STEPS}", f"--rows={ROWS}", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=self.folder)

    def assert_trains_as_python(self, ranks, statistics, *flags):
        expected, reference = train(self.folder, ranks if statistics == "local" else 1, statistics == "frozen")
        done = self.run_program(f"--ranks={ranks}", f"--statistics={statistics}", *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)$", done.stdout, re.MULTILINE)]
        self.assertEqual(len(losses), STEPS)
        self.assertLess(losses[-1], 0.9 * losses[0])
        for step, (got, wanted) in enumerate(zip(losses, expected)):
            self.assertLessEqual(abs(got - wanted), BOUND, f"{ranks} ranks, step {step + 1}")
        saved = torch.jit.load(self.folder / "trained.pt")
        self.assert_same_state(saved, reference)
        x = torch.load(self.folder / "sequences.pt")["x"]
        with torch.no_grad():
            difference = (saved.eval()(x) - reference.eval()(x)).abs().max().item()
        self.assertLessEqual(difference, BOUND)

    def assert_same_state(self, saved, reference):
        self.assertEqual([name for name, _ in saved.named_parameters()], [name for name, _ in reference.named_parameters()])
        self.assertTrue(all(parameter.requires_grad for parameter in saved.parameters()))
        state, wanted = saved.state_dict(), reference.state_dict()
        self.assertEqual(list(state), list(wanted))
        for name, tensor in wanted.items():
            self.assertEqual((state[name].shape, state[name].dtype), (tensor.shape, tensor.dtype), name)
            self.assertLessEqual((state[name].double() - tensor.double()).abs().max().item(), BOUND, name)

    def test_a_scripted_model_trains_as_in_python(self):
        export_model.export(self.folder, traced=False)
        for ranks in 1, 2, 3:
            self.assert_trains_as_python(ranks, "synchronized")
        for statistics in "local", "frozen":
            self.assert_trains_as_python(2, statistics)
        self.assert_trains_as_python(3, "synchronized", "--groups=")

    def test_a_traced_model_trains_as_in_python(self):
        export_model.export(self.folder, traced=True)
        self.assert_trains_as_python(2, "local")

    def test_a_frozen_export_is_an_error(self):
        export_model.export(self.folder, traced=False)
        model = torch.jit.load(self.folder / "model.pt").eval()
        for freeze in torch.jit.freeze, torch.jit.optimize_for_inference:
            freeze(model).save(self.folder / "model.pt")
            done = self.run_program("--ranks=2", "--groups=")
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("has no parameter: its weights are constants of the graph of forward", done.stderr)

    def test_bad_flags_are_errors(self):
        export_model.export(self.folder, traced=False)
        for flags, words in [
            (["--groups=Encoder"], "has no submodule of the class Encoder; it has BatchNorm1d, Conv1d, EncoderLayer"),
            (["--statistics=none"], "--statistics is 'none', but must be one of: synchronized, frozen, local"),
            (["--ranks=5"], "--rows is 12, which 5 ranks cannot share evenly"),
            (["--folder=nowhere"], "cannot read nowhere/sequences.pt"),
        ]:
            done = self.run_program(*flags)
            self.assertNotEqual(done.returncode, 0, flags)
            self.assertIn(words, done.stderr)


unittest.main()
