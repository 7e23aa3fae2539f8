"""A train step whose layers are split over 2 ranks, beside Python's tensor parallelism on gloo, and what DTensors cost on one rank."""
import contextlib
from statistics import median

from .processes import Ranks, interleaved
from .row import at_least_ratio, at_most, without_bound
from .train import PARTS, WARM_UP, Ranked, measure

RANKS = 2
ROUNDS = 20
WIDE = ["--layers=8", "--width=512", "--heads=8", "--sequence=128", "--batch=4"]
NARROW = ["--layers=24", "--width=64", "--heads=4", "--sequence=128", "--batch=4"]
OVER_PEER = 1.5  # Python's time over ours, at least
OVER_APART = 1.05  # layers that overlap where that was measured to be faster, over layers that do not, at most
OVER_PLAIN = 1.15  # a step on DTensors of one rank over one on plain tensors, at most


def run(programs, quick=False):
    rounds = 3 if quick else ROUNDS
    ours, peer = programs.ours("measure_step") + ["--dims=dp,tp"], programs.peer("measure_parallel_step.py")
    for name, flags in (("tensor parallel", []), ("sequence parallel", ["--sequence-parallel"])):
        wide = [*WIDE, f"--mesh=1x{RANKS}", *flags]
        milliseconds = measure({"ours": Ranked(ours + wide), "peer": Ranked(peer + wide)}, rounds)
        case = f"{RANKS} ranks, width 512, 8 layers, batch 4, 128 bytes, {name}"
        yield at_least_ratio("parallel", case, milliseconds("ours", "step"), milliseconds("peer", "step"), "ms", OVER_PEER)
        for part in PARTS:
            yield without_bound("parallel", f"{name}: {part}", milliseconds("ours", part), milliseconds("peer", part), "ms")
    yield from overlap(programs, rounds)
    plain = programs.ours("measure_step") + NARROW + ["--strategy=none"]
    jobs = {"parallel": Ranked(ours + [*NARROW, "--mesh=1x1"], ranks=1), "plain": Ranked(plain, ranks=1)}
    milliseconds = measure(jobs, rounds)
    yield at_most("parallel", "1 rank, width 64, 24 layers, batch 4: a step on DTensors over one on plain tensors",
                  milliseconds("parallel", "step") / milliseconds("plain", "step"), OVER_PLAIN, "x")


def overlap(programs, rounds):
    """Forward and backward under sequence parallelism, with and without products in chunks beside their collectives."""
    kinds = ("apart", "chunks", "measured")
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(Ranks(programs.ours("measure_overlap") + WIDE, RANKS))
        ranks.wait_until_ready()
        answers = interleaved(rounds, WARM_UP, {kind: lambda kind=kind: ranks.ask(kind) for kind in kinds})
        decisions = ranks.ask("decisions")[0]
    apart, chunks, measured = (1e3 * median(max(rank["step"] for rank in answer) for answer in answers[kind]) for kind in kinds)
    case = f"{RANKS} ranks, width 512, 8 layers, batch 4, sequences split, forward and backward"
    yield without_bound("parallel", f"{case}: layers in 4 chunks, beside layers apart", chunks, apart, "ms")
    yield at_most("parallel", f"{case}: as measured ({decisions['overlapping']} of {decisions['sizes']} sizes overlap), over apart",
                  measured / apart, OVER_APART, "x")
