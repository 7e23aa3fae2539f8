"""A train step in a pipeline on 2 ranks, beside Python's torch.distributed.pipelining on gloo, and a backward in two halves."""
import contextlib
from statistics import median

from .processes import Ranks, interleaved
from .row import at_least_ratio, at_most, without_bound
from .train import WARM_UP, Ranked, measure

RANKS = 2
ROUNDS = 20
SCHEDULES = ("1f1b", "interleaved-1f1b", "interleaved-zb")
WIDE = ["--layers=8", "--width=512", "--heads=8"]
NARROW = ["--layers=24", "--width=64", "--heads=4"]
COMMON = ["--sequence=128", "--batch=1", "--micro-batches=4"]
OVER_PEER = 1.3  # Python's time over ours, at least
HALVES = 1.05  # steps whose backwards have two halves over others, at most


def run(programs, quick=False):
    rounds = 3 if quick else ROUNDS
    for name, model in (("width 64, 24 layers", NARROW), ("width 512, 8 layers", WIDE)):
        for schedule in SCHEDULES:
            yield from beside_peer(programs, rounds, (name, model), schedule, schedule)
        yield from beside_peer(programs, rounds, (name, model), "zb-h1", "1f1b")
    yield halves(programs, rounds)


def beside_peer(programs, rounds, named_model, ours, theirs):
    """A step under the schedule `ours`, beside Python's under `theirs`; and the least that it can take, so that the peer's time over it is
    the largest ratio: the products of a rank's matrices alone, in the same rounds, and what ranks wait under the schedule."""
    name, model = named_model
    milliseconds = measured({"ours": programs.ours("measure_pipeline_step") + [*model, *COMMON, f"--schedule={ours}"],
                             "peer": programs.peer("measure_pipeline_step.py") + [*model, *COMMON, f"--schedule={theirs}"]}, rounds)
    schedules = ours if ours == theirs else f"{ours}, peer {theirs}"
    case = f"{RANKS} ranks, {name}, 4 micro-batches of 128 bytes, {schedules}"
    yield at_least_ratio("pipeline", case, milliseconds("ours", "step"), milliseconds("peer", "step"), "ms", OVER_PEER)
    for part in ("schedule", "optimizer"):
        yield without_bound("pipeline", f"{name}, {schedules}: {part}", milliseconds("ours", part), milliseconds("peer", part), "ms")
    yield without_bound("pipeline", f"{name}, {schedules}: products alone, in the schedule's time", milliseconds("products", "floor"),
                        milliseconds("peer", "step"), "ms")


def measured(commands, rounds):
    """As `measure`, with the products of our ranks as a third one that takes turns."""
    with contextlib.ExitStack() as stack:
        jobs = {name: stack.enter_context(Ranks(command, RANKS)) for name, command in commands.items()}
        for job in jobs.values():
            job.wait_until_ready()
        asked = {name: lambda job=job: job.ask("step") for name, job in jobs.items()}
        answers = interleaved(rounds, WARM_UP, {**asked, "products": lambda: jobs["ours"].ask("products")})
    return lambda name, part: 1e3 * median(max(rank[part] for rank in ranks) for ranks in answers[name])


def halves(programs, rounds):
    """On one rank, where the kernels take most of the time."""
    jobs = {schedule: Ranked(programs.ours("measure_pipeline_step") + [*WIDE, *COMMON, f"--schedule={schedule}"], ranks=1)
            for schedule in ("1f1b", "zb-h1")}
    milliseconds = measure(jobs, rounds)
    return at_most("pipeline", "1 rank, width 512, 8 layers: forwards and backwards in two halves, over whole ones",
                   milliseconds("zb-h1", "schedule") / milliseconds("1f1b", "schedule"), HALVES, "x")
