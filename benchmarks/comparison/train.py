"""A train step (forward, backward, clipping, AdamW) on 2 ranks, against Python's FSDP2 on gloo and against unsharded training."""
import contextlib
import dataclasses
from statistics import median

from .processes import Ranks, interleaved
from .row import at_least_ratio, at_most, without_bound

RANKS = 2
ROUNDS, WARM_UP = 20, 3
PARTS = ("forward", "backward", "clip", "optimizer")
EXPOSED = 0.12  # of the step
ROWS = 8  # a rank, beside one process


@dataclasses.dataclass
class Model:
    name: str
    flags: list
    over_peer: float  # FSDP2's time over ours, at least
    over_one: float  # that of one process with the same global batch over ours, at least


MODELS = [Model("width 512, 8 layers", ["--layers=8", "--width=512", "--heads=8", "--sequence=128"], 1.7, 1.7),
          Model("width 64, 24 layers", ["--layers=24", "--width=64", "--heads=4", "--sequence=128"], 4, 1.6)]


def run(programs, quick=False):
    for model in MODELS:
        yield from rows_of(programs, model, 3 if quick else ROUNDS)


def rows_of(programs, model, rounds):
    ours = programs.ours("measure_step") + model.flags
    jobs = {"ragged": Ranked(ours + ["--batch=1", "--layout=ragged"]),
            "per-parameter": Ranked(ours + ["--batch=1", "--layout=per-parameter"]),
            "apart": Ranked(ours + ["--batch=1", "--strategy=none"], apart=True),
            "peer": Ranked(programs.peer("measure_step.py") + model.flags + ["--batch=1"])}
    milliseconds = measure(jobs, rounds)
    case = f"{RANKS} ranks, {model.name}, batch 1, 128 bytes"
    yield at_least_ratio("train", f"{case}, ragged", milliseconds("ragged", "step"), milliseconds("peer", "step"), "ms", model.over_peer)
    yield without_bound("train", f"{case}, per-parameter", milliseconds("per-parameter", "step"), milliseconds("peer", "step"), "ms")
    for layout in ("ragged", "per-parameter"):
        for part in PARTS:
            yield without_bound("train", f"{model.name}, {layout}: {part}", milliseconds(layout, part), milliseconds("peer", part), "ms")
    added = sum(milliseconds("ragged", part) - milliseconds("apart", part) for part in ("forward", "backward"))
    yield at_most("train", f"{model.name}, what sharding adds to forward and backward, of a step", added / milliseconds("ragged", "step"),
                  EXPOSED, "x")
    milliseconds = measure({"ragged": Ranked(ours + [f"--batch={ROWS}"]),
                            "one": Ranked(ours + [f"--batch={RANKS * ROWS}", "--strategy=none"], ranks=1)}, max(3, rounds // 2))
    yield at_least_ratio("train", f"{RANKS} ranks, {model.name}, batch {ROWS}, beside one process with the batch of both",
                         milliseconds("ragged", "step"), milliseconds("one", "step"), "ms", model.over_one)


@dataclasses.dataclass
class Ranked:
    """A program on some ranks: of one job, or apart, so that nothing is sharded or sent, and all compute at the same time."""

    command: list
    ranks: int = RANKS
    apart: bool = False


def measure(jobs, rounds):
    """The median milliseconds of a part over rounds in which all take turns; of the ranks the slowest counts."""
    with contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(Ranks(job.command, job.ranks, apart=job.apart)) for name, job in jobs.items()}
        for job in started.values():
            job.wait_until_ready()
        answers = interleaved(rounds, WARM_UP, {name: lambda job=job: job.ask("step") for name, job in started.items()})
    return lambda name, part: 1e3 * median(max(rank[part] for rank in ranks) for ranks in answers[name])
