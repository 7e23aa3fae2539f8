"""Runs a script of this folder on some ranks of this host, and prints what rank 0 prints: forked_ranks.py RANKS SCRIPT ARGUMENT...

The ranks are forks of this process, which has loaded PyTorch. For each of them that would take seconds of a processor. So no time is
measured here.
"""
import ctypes
import os
import pathlib
import runpy
import signal
import sys
import tempfile
import traceback

import torch._dynamo  # noqa: F401  which an optimizer loads at its first step
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.tensor.parallel  # noqa: F401

PEER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(PEER.parent))
from comparison.processes import free_port  # noqa: E402

SET_DEATH_SIGNAL = 1  # of prctl


def be_rank(rank, ranks, port, output, script, arguments):
    """Runs the script in place of this process's program."""
    try:
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        os.dup2(output, sys.stdout.fileno())
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                          RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(PEER))
        runpy.run_path(str(script), run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    except BaseException:  # noqa: B902  the parent goes on
        traceback.print_exc()
        os._exit(1)


def printed_by_forks(script, arguments, ranks):
    """What rank 0 prints."""
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


if __name__ == "__main__":
    print(printed_by_forks(sys.argv[2], sys.argv[3:], int(sys.argv[1])), end="")
