"""The orders of schedules, which a program prints, beside those of torch.distributed.pipelining for the same shapes."""
import itertools
import subprocess
import sys
import types
import unittest

from torch.distributed.pipelining import schedules

PROGRAM = sys.argv.pop()
LOOPED = {"interleaved-1f1b": schedules.ScheduleInterleaved1F1B, "looped-bfs": schedules.ScheduleLoopedBFS,
          "interleaved-zb": schedules.ScheduleInterleavedZeroBubble}
V = {"zb-v": schedules.ScheduleZBVZeroBubble, "dualpipe-v": schedules.ScheduleDualPipeV}


def stage(ranks, stages):
    """What the constructors of schedules ask a stage for."""
    return types.SimpleNamespace(group_size=ranks, num_stages=stages, group_rank=0, group=None, submod=None, has_backward=True, stage_index=0,
                                 is_first=True, is_last=False, stage_index_to_group_rank=None)


def pytorch_order(schedule, ranks, chunks, count):
    """A text a rank; None where PyTorch takes no such shape."""
    try:
        made = schedule([stage(ranks, ranks * chunks) for _ in range(chunks)], count, loss_fn=None)
    except ValueError:
        return None
    return [",".join(str(action) for action in made.pipeline_order[rank] if action) for rank in range(ranks)]


def printed_orders():
    """{(name, ranks, stages a rank, micro-batches): a text a rank}"""
    orders = {}
    for line in subprocess.run([PROGRAM], capture_output=True, text=True, check=True).stdout.splitlines():
        name, ranks, chunks, count, order = line.split(" ")
        orders[name, int(ranks), int(chunks), int(count)] = order.split("|")
    return orders


class Orders(unittest.TestCase):
    def compare(self, kinds, chunks):
        ours, compared = printed_orders(), 0
        for (name, schedule), ranks, chunk, count in itertools.product(kinds.items(), (2, 3, 4), chunks, range(1, 13)):
            expected = pytorch_order(schedule, ranks, chunk, count)
            if expected is not None:
                compared += 1
                self.assertEqual(ours.get((name, ranks, chunk, count)), expected, (name, ranks, chunk, count))
        return compared

    def test_of_stages_that_go_round(self):
        self.assertEqual(self.compare(LOOPED, (1, 2, 3)), 270)

    def test_of_one_stage_a_rank(self):
        self.assertEqual(self.compare({"zb-h1": LOOPED["interleaved-zb"]}, (1,)), 27)

    def test_of_stages_that_go_down_and_up(self):
        self.assertGreater(self.compare(V, (2,)), 50)


if __name__ == "__main__":
    unittest.main()
