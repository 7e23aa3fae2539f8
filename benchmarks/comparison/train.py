"""A train step (forward, backward, clipping, AdamW) on 2 gloo ranks, against Python's FSDP2."""
import contextlib

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
        medians = interleaved(3 if quick else ROUNDS, WARM_UP,
                              {name: lambda job=job: 1e3 * max(job.ask("step")) for name, job in jobs.items()})
    case = f"{RANKS} ranks, width 512, 8 layers, batch 1, 128 bytes"
    return [
        at_least_ratio("train", case + ", ragged", medians["ragged"], medians["peer"], "ms/step", 1.2),
        without_bound("train", case + ", per-parameter", medians["per-parameter"], medians["peer"], "ms/step"),
    ]
