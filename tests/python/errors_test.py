"""What goes wrong ends in an error that says what, and on which rank: never in a hang."""
import datetime
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import torch
import torch.distributed as dist

import ranks
from ranks import error_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHORT = datetime.timedelta(seconds=3)
NEVER = datetime.timedelta(hours=1)  # `ranks.run` gives up long before


def other_calls():
    if dist.get_rank() == 0:
        return error_of(dist.broadcast, torch.ones(4), 0)
    return error_of(dist.all_reduce, torch.ones(4))


def other_sizes():
    return error_of(dist.all_reduce, torch.ones(4 + dist.get_rank()))


def other_tags():
    if dist.get_rank() == 0:
        return error_of(dist.send, torch.ones(2), 1, tag=1)
    return error_of(dist.recv, torch.ones(2), 0, tag=2)


def bad_arguments():
    """Refused before anything is sent: the group works afterwards."""
    own, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    errors = [error_of(dist.all_gather_into_tensor, torch.empty(size * 3 + 1), torch.ones(3)),
              error_of(dist.all_gather, [torch.empty(4) for _ in range(size)], torch.ones(3)),
              error_of(dist.reduce_scatter_tensor, torch.empty(2), torch.ones(2 * size + 1)),
              error_of(dist.all_reduce, torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG),
              error_of(dist.all_reduce, torch.ones(3, dtype=torch.int32), dist._make_nccl_premul_sum(0.5)),
              error_of(dist.all_reduce, torch.ones(3), dist.ReduceOp.BAND),
              error_of(dist.reduce_scatter_tensor, torch.empty(3), torch.ones(3 * size), dist.ReduceOp.BXOR),
              error_of(dist.all_to_all_single, torch.empty(2), torch.empty(2), [1], [1]),
              error_of(group.broadcast, torch.ones(1), size + 3),
              error_of(group.allreduce, [torch.ones(1), torch.ones(1)]),
              error_of(dist.recv, torch.ones(1)),
              error_of(dist.all_reduce, torch.ones(2, 2).to_sparse_csr())]
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    return errors


def other_lists():
    """Lists whose sizes differ between the ranks, in pairs of groups: a group that has failed cannot be used again."""
    own, errors = dist.get_rank(), []
    groups = [dist.new_group() for _ in range(4)]
    sizes = (1, 3) if own == 0 else (3, 1)
    errors.append(error_of(dist.reduce_scatter, torch.empty(1), [torch.ones(size) for size in sizes], group=groups[0]))
    errors.append(error_of(dist.all_gather, [torch.empty(size) for size in sizes], torch.ones(1), group=groups[1]))
    errors.append(error_of(dist.gather, torch.ones(1), [torch.empty(1), torch.empty(2)] if own == 0 else None, group=groups[2]))
    errors.append(error_of(dist.scatter, torch.empty(1), [torch.ones(1), torch.ones(2)] if own == 0 else None, group=groups[3]))
    return errors


def other_sparse_tensors():
    """The tensors stay as they are, and the group works afterwards."""
    own, size = dist.get_rank(), dist.get_world_size()
    tensors = (torch.ones(3 + 100 * own, 2).to_sparse(1), torch.ones(3, 2).to_sparse(1 + own % 2),
               torch.ones(3, 2, dtype=torch.float32 if own else torch.float64).to_sparse(1))
    errors = []
    for tensor in tensors:
        before = tensor.clone()
        errors.append(error_of(dist.all_reduce, tensor))
        assert tensor.shape == before.shape and torch.equal(tensor.to_dense(), before.to_dense())
    tensor = torch.ones(3, 2).to_sparse(1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), torch.full((3, 2), float(size)))
    return errors


def one_is_killed(how):
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "wait":
        return error_of(dist.all_reduce, torch.ones(1000))
    return error_of(dist.all_reduce(torch.ones(1000), async_op=True).get_future().wait)


def one_stays_away(how):
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["over"], datetime.timedelta(seconds=60))
        return None
    if how == "group":
        text = error_of(dist.all_reduce, torch.ones(4))
    elif how == "wait":
        text = error_of(dist.all_reduce(torch.ones(4), async_op=True).wait, datetime.timedelta(milliseconds=200))
    elif how == "set":
        dist.group.WORLD.set_timeout(datetime.timedelta(milliseconds=200))
        text = error_of(dist.all_reduce, torch.ones(4))
    elif how == "new group":
        text = error_of(dist.new_group, [0, 1], timeout=SHORT)
    store.set("over", "")
    return text


def other_calls_in_a_pair():
    dist.all_reduce(torch.ones(4))
    pair = dist.new_group([0, 2])
    if dist.get_rank() == 0:
        error_of(dist.all_reduce, torch.ones(4), group=pair)
    elif dist.get_rank() == 2:
        error_of(dist.broadcast, torch.ones(4), 0, group=pair)


def after_shutdown(how):
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True) if dist.get_rank() == 0 else None
    getattr(backend, how)()
    text = error_of(work.wait) if work else ""
    return text, error_of(dist.all_reduce, torch.ones(4), group=group)


def one_comes_late():
    longest = datetime.timedelta.max
    group = dist.new_group(timeout=longest)
    if dist.get_rank() == 1:
        time.sleep(0.5)
    tensor = torch.ones(4)
    return dist.all_reduce(tensor, group=group, async_op=True).wait(longest) and tensor[0].item()


def made_again():
    """A second group of the same name, in the same store."""
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("cpu:tessera", store=store, rank=rank, world_size=size, timeout=ranks.TIMEOUT)
        tensor = torch.full((1000,), float(rank))
        dist.all_reduce(tensor)
        assert tensor[0].item() == sum(range(size))


class Errors(unittest.TestCase):
    def assert_all(self, texts, *parts):
        for text in texts:
            for part in parts:
                self.assertIn(part, text)

    def test_different_calls(self):
        texts = ranks.run(2, other_calls)
        self.assert_all(texts, "different collectives", "broadcast 'BROADCAST'", "all_reduce 'ALLREDUCE'", "rank 0", "rank 1")

    def test_different_sizes(self):
        self.assert_all(ranks.run(3, other_sizes), "different collectives", "16 bytes", "20 bytes", "24 bytes")

    def test_different_tags(self):
        self.assert_all(ranks.run(2, other_tags), "'tag 1'", "'tag 2'")

    def test_bad_arguments(self):
        for rank, texts in enumerate(ranks.run(2, bad_arguments)):
            said = ("times the input's 3", f"the tensor for rank {rank} has 4 elements", "times the output's 2", "average of Int",
                    "PREMUL_SUM of Int is not defined", "BAND, BOR and BXOR of Float are not defined", "BXOR of Float",
                    "tensor splits not equal to group size", "root 5 is not in [0, 2)", "one tensor is needed, not 2", "src=", "")
            for text, part in zip(texts, said, strict=True):
                self.assertIn(part, text)
                if part not in ("tensor splits not equal to group size", ""):
                    self.assertIn(f"rank {rank}", text)

    def test_different_lists(self):
        for reduced, gathered, collected, scattered in ranks.run(2, other_lists):
            self.assert_all([reduced], "different collectives", "'REDUCE_SCATTER of 1, 3'", "'REDUCE_SCATTER of 3, 1'")
            self.assert_all([gathered], "different collectives", "4 bytes", "12 bytes")
            self.assert_all([collected], "rank 1 sends 4 bytes to rank 0, which expects 8 from it")
            self.assert_all([scattered], "rank 0 sends 8 bytes to rank 1, which expects 4 from it")

    def test_different_sparse_tensors(self):
        for size in (2, 3):
            for sizes, dims, dtypes in ranks.run(size, other_sparse_tensors):
                self.assertIn("rank 0 has Float of sizes [3, 2] with 1 sparse and 1 dense dims, rank 1 has Float of sizes [103, 2]",
                              sizes)
                self.assertIn("rank 1 has Float of sizes [3, 2] with 2 sparse and 0 dense dims, they must be equal", dims)
                self.assertIn("rank 0 has Double", dtypes)

    def test_a_killed_rank_is_named_before_the_timeout(self):
        for how in ("wait", "future"):
            with self.subTest(how=how):
                first, second, third = ranks.run(3, one_is_killed, how, timeout=NEVER, may_end=(1,))
                self.assertIsNone(second)
                self.assert_all([first, third], "rank 1, which has exited or failed")

    def test_a_rank_that_does_not_come(self):
        said = {"group": ("timed out after 3000 ms", "rank 1"), "wait": ("timed out after 200 ms", "ALLREDUCE", "on rank 0"),
                "set": ("timed out after 200 ms",), "new group": ("timed out after 3000 ms", "these did not come: 1")}
        for how, parts in said.items():
            with self.subTest(how=how):
                text = ranks.run(2, one_stays_away, how, timeout=SHORT)[0]
                self.assert_all([text], *parts)

    def test_a_timeout_beyond_the_longest(self):
        self.assertEqual(ranks.run(2, one_comes_late), [2, 2])

    def test_what_ranks_did_is_recorded(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.dict(os.environ, TESSERA_TRACE_FOLDER=folder):
            ranks.run(3, other_calls_in_a_pair)
            command = [sys.executable, str(ROOT / "tools" / "trace" / "tessera-trace"), folder]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.assert_all([text], "of 3 ranks; no file of rank 1", "group 0 [0, 1, 2]", "group 1 [0, 2]",
                        "rank 0: #0 all_reduce 'ALLREDUCE' (16 bytes of Float, sum)",
                        "rank 2: #0 broadcast 'BROADCAST' (16 bytes of Float, root 0)")

    def test_shutdown(self):
        for how in ("abort", "shutdown"):
            with self.subTest(how=how):
                for rank, (pending, later) in enumerate(ranks.run(2, after_shutdown, how)):
                    self.assertIn("was shut down", later)
                    if rank == 0:
                        self.assertIn("all_reduce", pending)

    def test_a_group_is_made_again(self):
        ranks.run(3, made_again)


if __name__ == "__main__":
    unittest.main()
