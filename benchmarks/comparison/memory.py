"""Bytes of parameters, gradients and optimizer state a rank, fully sharded."""
from .processes import Ranks
from .row import at_most

MODEL = ["--layers=4", "--width=256", "--heads=4", "--sequence=64", "--batch=1"]


def state_bytes(command, ranks):
    """The largest of the ranks', and the number of parameters."""
    with Ranks(command, ranks) as job:
        job.wait_until_ready()
        job.ask("step")
        answers = job.ask("memory")
    return max(answer["state_bytes"] for answer in answers), answers[0]["parameters"]


def run(programs, quick=False):
    for ranks in (1, 2) if quick else (1, 2, 4):
        peer, _ = state_bytes(programs.peer("measure_step.py") + MODEL, ranks)
        for layout in ("ragged", "per-parameter"):
            ours, parameters = state_bytes(programs.ours("measure_step") + MODEL + [f"--layout={layout}"], ranks)
            yield at_most("memory", f"{parameters} parameters, {ranks} ranks, {layout}", ours, 1.01 * 16 * parameters / ranks,
                          "bytes a rank", peer)
