"""Runs of train_gpt, and of Python's FSDP2 on what train_gpt wrote, as loss curves."""
import json
import pathlib

from .processes import run

STEPS, HEADS, CLIP, WEIGHT_DECAY = 20, 4, 0.5, 0.1
# 12 sequences divide among 1, 2, 3 and 4 ranks. The clip bites in every step.
FLAGS = [f"--steps={STEPS}", "--layers=3", "--width=64", f"--heads={HEADS}", "--sequence=32", "--global-batch=12", "--lr=1e-3",
         "--warmup=5", f"--clip={CLIP}", f"--weight-decay={WEIGHT_DECAY}", "--seed=7", "--validation-batches=0", "--sample-bytes=0"]
TIMEOUT = 300


def curve(programs, folder, flags):
    """The losses of one run of train_gpt, by step."""
    log = pathlib.Path(folder) / "log.jsonl"
    log.unlink(missing_ok=True)
    run(programs.ours("train_gpt") + FLAGS + [f"--log={log}", *flags], TIMEOUT)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


def peer_curve(programs, initial, ranks, flags):
    """The losses of Python's FSDP2 from the weights and the batches in `initial`."""
    arguments = [f"--initial={initial}", f"--heads={HEADS}", f"--clip={CLIP}", f"--weight-decay={WEIGHT_DECAY}", *flags]
    losses = run(programs.peer("forked_ranks.py") + [str(ranks), "train.py", *arguments], TIMEOUT)
    return dict(enumerate(json.loads(losses), start=1))


def differences(a, b):
    """The absolute differences of two curves over the steps of the first."""
    return [abs(a[step] - b[step]) for step in a]
