"""Steps of optimizers on one rank: a large shard beside ATen's kernel and the memory, 300 small parameters beside plain ones and
Python's DTensor, and each optimizer."""
from statistics import median

from .processes import Ranks
from .row import at_least_ratio, at_most, without_bound

MIB = 1 << 20
ELEMENTS = 32 * MIB
BYTES = 28  # of a step of AdamW, an element: reads of four arrays, writes of three
LEAST_BANDWIDTH = 0.85  # of a sweep of the same arrays
SMALL_BOUND = 1.1  # times plain
PEER_BOUND = 4  # times as fast as Python's DTensor


def run(programs, quick=False):
    suffix, turns = (", quick", 1) if quick else ("", 5)
    with Ranks(programs.ours("measure_optimizers"), 1) as ours, Ranks(programs.peer("measure_optimizers.py"), 1) as peer:
        ours.wait_until_ready()
        peer.wait_until_ready()
        answers = [ours.ask("large" + suffix)[0] for _ in range(turns)]
        step, kernel, sweep = (median(each) for each in zip(*answers))
        case = f"FusedAdamW, {ELEMENTS // MIB} Mi fp32 parameters in one shard"
        yield at_least_ratio("optimizers", f"{case}, beside torch's fused kernel", 1e3 * step, 1e3 * kernel, "ms", 1 / 1.02)
        yield at_least_ratio("optimizers", f"{case}, beside a sweep of its {BYTES} bytes an element ({BYTES * ELEMENTS / sweep / 1e9:.1f} GB/s)",
                             1e3 * step, 1e3 * sweep, "ms", LEAST_BANDWIDTH)
        yield from small(ours, peer, turns)
        for name, time in ours.ask("each" + suffix)[0].items():
            yield without_bound("optimizers", f"{name}, 4 Mi elements, an element", time, None, "ns")


def small(ours, peer, turns):
    """A step, and clipping, of 300 parameters of 32 × 32."""
    answers = [(ours.ask("small")[0], peer.ask("small")[0]) for _ in range(turns)]
    plain_step, step, plain_clip, clip = (median(each) for each in zip(*(answer[0] for answer in answers)))
    peer_step, peer_clip = (median(each) for each in zip(*(answer[1] for answer in answers)))
    for name, plain, sharded, theirs in (("step", plain_step, step, peer_step), ("clip_grad_norm_", plain_clip, clip, peer_clip)):
        case = f"{name} of 300 small parameters"
        yield at_most("optimizers", f"{case}, over plain ones ({1e6 * plain:.0f} us)", sharded / plain, SMALL_BOUND, "x")
        yield at_least_ratio("optimizers", f"{case}, beside Python's DTensor", 1e6 * sharded, 1e6 * theirs, "us", PEER_BOUND)
