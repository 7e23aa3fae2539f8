"""A train step under each strategy on 2 gloo ranks, beside Python's DDP, and with recompute in one process."""
import contextlib
from statistics import median

from .processes import Ranks, interleaved
from .row import at_least_ratio, at_most, without_bound

MODELS = {"width 64, 24 layers": ["--layers=24", "--width=64", "--heads=4", "--sequence=128", "--batch=1"],
          "width 512, 8 layers": ["--layers=8", "--width=512", "--heads=8", "--sequence=128", "--batch=1"]}
RANKS = 2
ROUNDS, WARM_UP = 15, 3
FULL_OVER_NO_SHARD = 1.5  # it sends 1.5 times the bytes
RECOMPUTE = 1.35  # of the compute: a third of it again


def run(programs, quick=False):
    for case, flags in list(MODELS.items())[:1 if quick else None]:
        yield from rows_of(programs, case, flags, 3 if quick else ROUNDS)


def rows_of(programs, case, flags, rounds):
    ours = programs.ours("measure_step") + flags
    jobs = {name: (ours + [f"--strategy={name}"], RANKS) for name in ("no-shard", "zero-1", "zero-2", "full")}
    jobs["ddp"] = (programs.peer("measure_step.py") + flags + ["--strategy=ddp"], RANKS)
    jobs["one process"] = (ours + ["--strategy=none"], 1)
    jobs["one process, recompute"] = (ours + ["--strategy=none", "--recompute"], 1)
    seconds = steps(jobs, rounds)
    yield at_least_ratio("fsdp", f"{case}, no-shard beside DDP", 1e3 * seconds["no-shard"], 1e3 * seconds["ddp"], "ms", 1.0)
    yield at_most("fsdp", f"{case}, full over no-shard", seconds["full"] / seconds["no-shard"], FULL_OVER_NO_SHARD, "x")
    yield at_most("fsdp", f"{case}, recompute over none, one process",
                  seconds["one process, recompute"] / seconds["one process"], RECOMPUTE, "x")
    for name in ("zero-1", "zero-2", "full"):
        yield without_bound("fsdp", f"{case}, {name} beside no-shard", 1e3 * seconds[name], 1e3 * seconds["no-shard"], "ms")


def steps(jobs, rounds):
    """Seconds of a step, the median over rounds in which all take turns; of the ranks the slowest counts."""
    with contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(Ranks(command, ranks)) for name, (command, ranks) in jobs.items()}
        for job in started.values():
            job.wait_until_ready()
        answers = interleaved(rounds, WARM_UP, {name: lambda job=job: job.ask("step") for name, job in started.items()})
    return {name: median(max(rank["step"] for rank in ranks) for ranks in rounds) for name, rounds in answers.items()}
