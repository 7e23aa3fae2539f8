"""A train step (forward, backward, clipping, AdamW) on 2 gloo ranks, against Python's FSDP2."""
import contextlib
from statistics import median

from .processes import Ranks, interleaved
from .row import at_least_ratio, without_bound

MODEL = ["--layers=8", "--width=512", "--heads=8", "--sequence=128", "--batch=1"]
RANKS = 2
ROUNDS, WARM_UP = 20, 3


def run(programs, quick=False):
    ours = programs.ours("measure_step") + MODEL
    commands = {
        "ragged": ours + ["--layout=ragged"],
        "per-parameter": ours + ["--layout=per-parameter"],
        "peer": programs.peer("measure_step.py") + MODEL,
    }
    with contextlib.ExitStack() as stack:
        jobs = {name: stack.enter_context(Ranks(command, RANKS)) for name, command in commands.items()}
        for job in jobs.values():
            job.wait_until_ready()
        answers = interleaved(3 if quick else ROUNDS, WARM_UP, {name: lambda job=job: job.ask("step") for name, job in jobs.items()})

    def milliseconds(name, part):
        """The median over the rounds; of the ranks the slowest counts."""
        return 1e3 * median(max(rank[part] for rank in ranks) for ranks in answers[name])

    case = f"{RANKS} ranks, width 512, 8 layers, batch 1, 128 bytes"
    rows = [at_least_ratio("train", f"{case}, ragged", milliseconds("ragged", "step"), milliseconds("peer", "step"), "ms", 1.2),
            without_bound("train", f"{case}, per-parameter", milliseconds("per-parameter", "step"), milliseconds("peer", "step"), "ms")]
    for layout in ("ragged", "per-parameter"):
        rows += [without_bound("train", f"{layout}: {part}", milliseconds(layout, part), milliseconds("peer", part), "ms")
                 for part in ("forward", "backward", "clip", "optimizer")]
    return rows
