"""Collectives in PyTorch's profiler: an event of each, as gloo has it, from its call to its end."""
import unittest

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

import ranks


def calls(group):
    """Each once, with tensors of 2 × 3, and what gloo names otherwise: it reduces and scatters with all-reduces."""
    size, own = group.size(), group.rank()

    def one():
        return torch.ones(2, 3)

    def of_ranks():
        return [one() for _ in range(size)]

    def wide():
        return torch.ones(2 * size, 3)

    def coalesced(call):
        with dist._coalescing_manager(group):
            for _ in range(2):
                call()

    def message():
        if own == 0:
            dist.send(one(), group=group, group_dst=1)
        elif own == 1:
            dist.recv(one(), group=group, group_src=0)

    of_root = of_ranks() if own == 0 else None
    gloo_has = {
        "broadcast": lambda: dist.broadcast(one(), group=group, group_src=0),
        "all_reduce": lambda: dist.all_reduce(one(), group=group),
        "coalesced all_reduce": lambda: coalesced(lambda: dist.all_reduce(one(), group=group)),
        "sparse": lambda: dist.all_reduce(one().to_sparse(), group=group),
        "reduce": lambda: dist.reduce(one(), group=group, group_dst=0),
        "all_gather": lambda: dist.all_gather(of_ranks(), one(), group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide(), one(), group),
        "coalesced all_gather": lambda: coalesced(lambda: dist.all_gather_into_tensor(wide(), one(), group)),
        "gather": lambda: dist.gather(one(), of_root, group=group, group_dst=0),
        "scatter": lambda: dist.scatter(one(), of_root, group=group, group_src=0),
        "all_to_all_single": lambda: dist.all_to_all_single(wide(), wide(), group=group),
        "message": message if size > 1 else lambda: None,
        "barrier": lambda: dist.barrier(group)}
    ours = {
        "reduce_scatter": (lambda: dist.reduce_scatter(one(), of_ranks(), group=group), [[2, 3]] * size),
        "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(one(), wide(), group=group), [[2 * size, 3]]),
        "coalesced reduce_scatter": (lambda: coalesced(lambda: dist.reduce_scatter_tensor(one(), wide(), group=group)),
                                     [[2 * size, 3]] * 2)}
    return gloo_has, ours


def events(call, backend):
    """What the profile of a call has of the backend: names without its own, and shapes."""
    with profile(record_shapes=True) as found:
        call()
    found = [event for event in found.events() if event.name.startswith(backend + ":")]
    assert all(event.is_async and event.count == 1 and event.time_range.elapsed_us() >= 0 for event in found), found
    return [(event.name.removeprefix(backend), event.input_shapes) for event in found]


def differences():
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    found, expected = calls(ours), calls(gloo)
    different = []
    for name, call in found[0].items():
        pair = events(call, "tessera"), events(expected[0][name], "gloo")
        different += [(name, *pair)] if pair[0] != pair[1] else []
    for name, (call, shapes) in found[1].items():
        event = events(call, "tessera")
        different += [(name, event)] if event != [(":reduce_scatter", shapes)] else []
    return different


def ends():
    """Whether the event of a call lasts beyond what the program does before its end, for each way to see that."""
    ways = {"wait": lambda work: work.wait(), "future": lambda work: work.get_future().wait(),
            "wait with a timeout": lambda work: work.wait(ranks.TIMEOUT)}
    lasts = []
    for see_end in ways.values():
        with profile() as found:
            work = dist.all_reduce(torch.ones(8, 8).t(), async_op=True)
            with record_function("meanwhile"):
                torch.ones(3).sum()
            see_end(work)
        (event,) = [event for event in found.events() if event.name == "tessera:all_reduce"]
        (between,) = [event for event in found.events() if event.name == "meanwhile"]
        lasts.append(event.time_range.start <= between.time_range.start and between.time_range.end <= event.time_range.end)
    return all(lasts)


def outlives():
    """How many events a profile has that begins after the end of another one, in which a call began that ends only then."""
    def start():
        return dist.all_reduce(torch.ones(8, 8), async_op=True)

    ways = [lambda work: work.wait(), lambda work: work.get_future().wait(), lambda work: None]
    counts = []
    for see_end in ways:
        with profile():
            work = start()
        see_end(work)
        with profile():
            work = start()
        with profile() as found:
            see_end(work)
            del work
            start().wait()
        counts.append(sum(event.name == "tessera:all_reduce" for event in found.events()))
    return counts


class Profiles(unittest.TestCase):
    def test_each_collective_has_an_event_as_on_gloo(self):
        for size in (1, 2, 3):
            with self.subTest(ranks=size):
                self.assertEqual(ranks.run(size, differences), size * [[]])

    def test_it_lasts_until_the_end(self):
        for size in (1, 2):
            with self.subTest(ranks=size):
                self.assertEqual(ranks.run(size, ends), size * [True])

    def test_calls_may_outlive_it(self):
        self.assertEqual(ranks.run(2, outlives), 2 * [[1, 1, 1]])


if __name__ == "__main__":
    unittest.main()
