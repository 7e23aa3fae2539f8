"""Python's lock: whoever waits in the backend gives it up, because a thread that lets go of a tensor takes it."""
import datetime
import sys
import threading
import unittest

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from tessera_backend._extension import make_backend

import ranks
from ranks import error_of

MOMENT = datetime.timedelta(milliseconds=1)
HOUR = datetime.timedelta(hours=1)  # `ranks.run` gives up long before


def own_backend(name):
    """One that nobody else holds."""
    group = c10d._DistributedBackendOptions()
    group.store, group.group_rank, group.group_size = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    group.timeout, group.group_id, group.global_ranks_in_group = HOUR, name, list(range(dist.get_world_size()))
    return make_backend(group)


def start(backend, timeout=None):
    """A call whose tensor nobody else holds."""
    options = dist.AllreduceOptions()
    if timeout:
        options.timeout = timeout
    return backend.allreduce([torch.ones(5).t()], options)


def drop_backend(how):
    """Rank 0 drops its backend while calls of it are in flight, which the other ranks have not made."""
    backend = own_backend(how)
    if dist.get_rank() == 0:
        if how == "after a wait with a timeout":
            error_of(start(backend, MOMENT).wait)
        works = [start(backend) for _ in range(3)] if how != "with a dropped call" else [start(backend) and None]
        futures = [work.get_future() for work in works] if how == "with futures" else []
        if how == "with a work that outlives it":
            del backend
            del works, futures
        elif how == "on another thread":
            holder = [backend]
            del backend
            thread = threading.Thread(target=holder.clear)
            thread.start()
            thread.join()
        else:
            del works
            del backend
    dist.barrier()


def poll_and_complete():
    """One thread polls calls, while others wait for them."""
    for _ in range(200):
        work = dist.all_reduce(torch.ones(5000), async_op=True)
        thread = threading.Thread(target=work.wait)
        thread.start()
        while not work.is_completed():
            pass
        thread.join()
    assert work.is_success()


def call_beside_another_interpreter():
    """With a second interpreter, Python says of each thread that it has the lock: the backend's, and those that gave it up."""
    interpreters = __import__("_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters")
    before = dist.all_reduce(torch.ones(5000).t(), async_op=True)
    interpreters.create()
    for _ in range(20):
        works = [dist.all_reduce(torch.ones(5000), async_op=True) for _ in range(3)]
        thread = threading.Thread(target=works[0].wait)
        thread.start()
        works[1].get_future().wait()
        works[2].wait(HOUR)
        thread.join()
    before.wait()
    drop_backend("beside another interpreter")


class Threads(unittest.TestCase):
    def test_a_backend_is_dropped_while_calls_are_in_flight(self):
        for how in ("at once", "after a wait with a timeout", "with futures", "with a dropped call", "with a work that outlives it",
                    "on another thread"):
            with self.subTest(how=how):
                ranks.run(2, drop_backend, how)

    def test_polls_beside_waits(self):
        for size in (1, 3):
            with self.subTest(ranks=size):
                ranks.run(size, poll_and_complete)

    def test_calls_beside_another_interpreter(self):
        for size in (1, 2):
            with self.subTest(ranks=size):
                ranks.run(size, call_beside_another_interpreter)


if __name__ == "__main__":
    unittest.main()
