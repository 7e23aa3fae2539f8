"""A train step in a pipeline on 2 ranks, beside Python's torch.distributed.pipelining on gloo, and a backward in two halves."""
from .row import at_least_ratio, at_most, without_bound
from .train import Ranked, measure

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
            flags = [*model, *COMMON, f"--schedule={schedule}"]
            milliseconds = measure({"ours": Ranked(programs.ours("measure_pipeline_step") + flags),
                                    "peer": Ranked(programs.peer("measure_pipeline_step.py") + flags)}, rounds)
            case = f"{RANKS} ranks, {name}, 4 micro-batches of 128 bytes, {schedule}"
            yield at_least_ratio("pipeline", case, milliseconds("ours", "step"), milliseconds("peer", "step"), "ms", OVER_PEER)
            for part in ("schedule", "optimizer"):
                yield without_bound("pipeline", f"{name}, {schedule}: {part}", milliseconds("ours", part), milliseconds("peer", part), "ms")
    yield halves(programs, rounds)


def halves(programs, rounds):
    """On one rank, where the kernels take most of the time."""
    jobs = {schedule: Ranked(programs.ours("measure_pipeline_step") + [*WIDE, *COMMON, f"--schedule={schedule}"], ranks=1)
            for schedule in ("1f1b", "zb-h1")}
    milliseconds = measure(jobs, rounds)
    return at_most("pipeline", "1 rank, width 512, 8 layers: forwards and backwards in two halves, over whole ones",
                   milliseconds("zb-h1", "schedule") / milliseconds("1f1b", "schedule"), HALVES, "x")
