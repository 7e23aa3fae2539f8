"""Tensor parallelism beside Python's: losses and weights after 20 steps from the same weights on the same batches.

    python_parity_test.py <build folder> [unittest's flags]

Of the cases on four ranks one runs, drawn with TESSERA_TEST_SEED; TESSERA_TEST_FULL=1 runs all.
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

import safetensors.torch
import torch

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peer")]
from comparison.processes import Programs  # noqa: E402
from comparison.training_runs import CLIP, HEADS, STEPS, WEIGHT_DECAY, curve  # noqa: E402
from forked_ranks import printed_by_forks  # noqa: E402

BUILD = pathlib.Path(sys.argv.pop(1))
BOUND = 1e-5
ON_FOUR_RANKS = ["test_four_parts", "test_sharded_and_sequence_parallel", "test_sharded_too"]
DRAWN = random.Random(int(os.environ.get("TESSERA_TEST_SEED", "1"))).choice(ON_FOUR_RANKS)


def read(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(safetensors.torch.load_file(file))
    return tensors


def comparable(name, weight):
    """Without the biases of keys: a softmax does not change with them, so that their gradients are rounding, which Adam divides by itself."""
    if not name.endswith("qkv.bias"):
        return weight
    query, _, value = weight.chunk(3)
    return torch.cat([query, value])


class PythonParity(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = pathlib.Path(cls.folder.name)
        cls.programs = Programs(BUILD)
        cls.initial = cls.path / "initial"
        cls.one_process = curve(cls.programs, cls.path, ["--strategy=none", f"--dump-initial={cls.initial}"])

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        if self._testMethodName in ON_FOUR_RANKS and self._testMethodName != DRAWN and os.environ.get("TESSERA_TEST_FULL") != "1":
            self.skipTest("not drawn")

    def ours(self, ranks, mesh, sequence_parallel):
        """Losses and weights of train_gpt."""
        saved, exported = self.path / f"saved-{self.id()}", self.path / f"exported-{self.id()}"
        losses = curve(self.programs, self.path, [f"--ranks={ranks}", f"--mesh={mesh}", "--dims=dp,tp", f"--checkpoint={saved}",
                                                  f"--sequence-parallel={str(sequence_parallel).lower()}",
                                                  f"--overlap={'always' if sequence_parallel else 'never'}"])
        tool = self.programs.ours("tessera-checkpoint")
        subprocess.run([*tool, "convert", saved / f"step-{STEPS:06}", exported, "--to=hugging-face"], check=True, stdout=subprocess.DEVNULL)
        return losses, read(exported)

    def pythons(self, ranks, mesh, sequence_parallel):
        """The same of PyTorch's parallelize_module, fully_shard and loss_parallel, over gloo."""
        weights = self.path / f"weights-{self.id()}.safetensors"
        arguments = [
            f"--initial={self.initial}", f"--weights={weights}", f"--heads={HEADS}", f"--clip={CLIP}", f"--weight-decay={WEIGHT_DECAY}",
            f"--mesh={mesh}", *(["--sequence-parallel"] if sequence_parallel else [])]
        losses = json.loads(printed_by_forks("train_parallel.py", arguments, ranks))
        return dict(enumerate(losses, start=1)), safetensors.torch.load_file(weights)

    def compare(self, ranks, mesh, sequence_parallel):
        losses, weights = self.ours(ranks, mesh, sequence_parallel)
        expected, python_weights = self.pythons(ranks, mesh, sequence_parallel)
        self.assertEqual(len(losses), STEPS)
        for step, loss in losses.items():
            self.assertLessEqual(abs(loss - expected[step]), BOUND, f"the loss of step {step}")
            self.assertLessEqual(abs(loss - self.one_process[step]), BOUND, f"the loss of step {step} beside one process")
        self.assertLess(losses[STEPS], losses[1])
        self.assertGreater(len(python_weights), 30)
        for name, expected_weight in python_weights.items():
            difference = (comparable(name, weights[name]) - comparable(name, expected_weight)).abs().max().item()
            self.assertLessEqual(difference, BOUND, name)

    def test_tensor_parallel(self):
        self.compare(2, "1x2", sequence_parallel=False)

    def test_sequence_parallel(self):
        self.compare(2, "1x2", sequence_parallel=True)

    def test_four_parts(self):
        self.compare(4, "1x4", sequence_parallel=True)

    def test_sharded_too(self):
        self.compare(4, "2x2", sequence_parallel=False)

    def test_sharded_and_sequence_parallel(self):
        self.compare(4, "2x2", sequence_parallel=True)


if __name__ == "__main__":
    unittest.main(verbosity=2, warnings="ignore")  # of pipes that Ranks leaves to the collector
