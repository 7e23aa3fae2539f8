"""Tensor parallelism beside Python's: losses and weights after 20 steps from the same weights on the same batches.

    python_parity_test.py <build folder> [unittest's flags]

Of the cases on four ranks one runs, drawn with TESSERA_TEST_SEED; TESSERA_TEST_FULL=1 runs all.
"""
import json
import os
import pathlib
import random
import runpy
import subprocess
import sys
import tempfile
import traceback
import unittest

import safetensors.torch
import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # what the forked ranks take

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
from comparison.processes import PEER, Programs, free_port  # noqa: E402
from comparison.training_runs import CLIP, HEADS, STEPS, WEIGHT_DECAY, curve  # noqa: E402

BUILD = pathlib.Path(sys.argv.pop(1))
BOUND = 1e-5
ON_FOUR_RANKS = ["test_four_parts", "test_sharded_and_sequence_parallel", "test_sharded_too"]
DRAWN = random.Random(int(os.environ.get("TESSERA_TEST_SEED", "1"))).choice(ON_FOUR_RANKS)


def read(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(safetensors.torch.load_file(file))
    return tensors


def be_rank(rank, ranks, port, output, script, arguments):
    """Runs a script of benchmarks/peer in place of this process's program."""
    try:
        os.dup2(output, sys.stdout.fileno())
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                          RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    except BaseException:  # noqa: B902  the parent goes on
        traceback.print_exc()
        os._exit(1)


def printed_by_forks(script, arguments, ranks):
    """What rank 0 of a script of benchmarks/peer prints. Forks of this process have loaded PyTorch already, which takes two seconds of a
    processor for each rank."""
    port = free_port()
    with tempfile.TemporaryFile() as output, open(os.devnull, "wb") as nowhere:
        sys.stdout.flush()
        forks = []
        for rank in range(ranks):
            fork = os.fork()
            if fork == 0:
                be_rank(rank, ranks, port, (nowhere if rank else output).fileno(), PEER / script, arguments)
            forks.append(fork)
        statuses = [os.waitpid(fork, 0)[1] for fork in forks]
        if any(statuses):
            raise AssertionError(f"the ranks of {script} ended with {statuses}")
        output.seek(0)
        return output.read().decode()


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
