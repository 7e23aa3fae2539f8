"""PyTorch's own tests of its backends, those that its wheel brings (torch.testing._internal.distributed.distributed_test), on ours.

They run as for gloo, with our backend in its place: the tests of collectives look for its events in a profile as well. A part of
them runs, drawn with TESSERA_TEST_SEED; TESSERA_TEST_FULL=1 runs all. TESSERA_TEST_BACKEND=gloo runs them on gloo.
"""
import os
import random
import sys
import tempfile
import types
import unittest

sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False))  # not needed here
TEMPORARY = tempfile.TemporaryDirectory()
os.environ.update(BACKEND="gloo", WORLD_SIZE="4", TEMP_DIR=TEMPORARY.name, INIT_METHOD=f"file://{TEMPORARY.name}/init")

import torch
import torch._dynamo  # which an optimizer loads at its first step: once here, in place of once in each fork
import torch.distributed as dist
from torch.testing._internal.distributed import distributed_test as pytorch

import tessera_backend  # noqa: F401  registers the backend

BACKEND = os.environ.get("TESSERA_TEST_BACKEND", "tessera")
PART = 5  # of the tests, one in so many

ANY_SOURCE = "receives from any rank are an error (docs/python.md)"
MONITORED = "dist.monitored_barrier refuses every backend that is not named gloo (docs/python.md)"
TIMEOUT = "looks for the words of gloo's error; tests/python/errors_test.py looks for ours"
FAIL = {  # what passes on gloo, and why not here
    "test_barrier_timeout_full_group": TIMEOUT,
    "test_barrier_timeout_global": TIMEOUT,
    "test_ddp_logging_data_cpu": "looks for the backend's name in DDP's log, where PyTorch calls all that are not its own 'custom'",
    "test_get_backend": "compares the backend's name with gloo's",
    "test_monitored_barrier_gloo": MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": MONITORED,
    "test_monitored_barrier_gloo_subgroup": MONITORED,
    "test_send_recv_any_source": ANY_SOURCE,
    "test_send_recv_any_source_autograd_profiler": ANY_SOURCE,
    "test_send_recv_any_source_torch_profiler": ANY_SOURCE,
}

if BACKEND == "tessera":
    pytorch.PROFILING_SUPPORTED_BACKENDS.append(BACKEND)
    pytorch.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(BACKEND)


def with_our_backend(function):
    def call(*arguments, backend=None, **options):
        return function(*arguments, backend=BACKEND if backend == "gloo" else backend, **options)

    return call


class PyTorch(pytorch.TestDistBackend, pytorch.DistributedTest._DistTestBase):
    def setUp(self):
        name = self._current_test_name()
        if BACKEND == "tessera" and name in FAIL:
            self.skipTest(FAIL[name])
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)  # PyTorch's own start each rank anew

    @classmethod
    def _run(cls, *arguments, **options):
        torch.set_num_threads(1)
        dist.init_process_group = with_our_backend(dist.init_process_group)
        dist.new_group = with_our_backend(dist.new_group)
        super()._run(*arguments, **options)


class Drawn(unittest.TestLoader):
    def getTestCaseNames(self, case):  # noqa: N802  unittest's name
        names = super().getTestCaseNames(case)
        unknown = FAIL.keys() - set(names)
        assert not unknown, f"PyTorch has no such tests: {unknown}"
        if os.environ.get("TESSERA_TEST_FULL") == "1":
            return names
        return sorted(random.Random(int(os.environ.get("TESSERA_TEST_SEED", "1"))).sample(names, len(names) // PART))


if __name__ == "__main__":
    unittest.main(testLoader=Drawn())
