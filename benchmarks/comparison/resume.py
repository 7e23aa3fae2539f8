"""Runs of train_gpt that are resumed on other numbers of ranks, strategies and layouts, against one run without interruption."""
import pathlib
import shutil
import tempfile

from .row import at_most
from .training_runs import STEPS, curve, differences

BOUND = 1e-5
# A run's stages, one after another: how many ranks, and how they share the model.
CASES = (
    ((4, "ragged"), (2, "ragged"), (3, "ragged")),
    ((4, "per-parameter"), (2, "per-parameter"), (3, "per-parameter")),
    ((4, "ragged", "hybrid", "2x2"), (2, "per-parameter", "no-shard"), (3, "ragged")),
)


def flags(ranks, layout, strategy="full", mesh=None):
    return [f"--ranks={ranks}", f"--layout={layout}", f"--strategy={strategy}", *([f"--mesh={mesh}"] if mesh else [])]


def name(ranks, layout, strategy="full", mesh=None):
    return f"{ranks} ranks {strategy} {layout}"


def saved_steps(stages):
    """After which steps a stage ends."""
    return [STEPS * (stage + 1) // len(stages) for stage in range(len(stages))]


def stage_losses(programs, folder, checkpoints, stage, last):
    """Goes on from the newest checkpoint; the losses up to step `last`. What was saved after it is thrown away, as by an interruption."""
    losses = curve(programs, folder, [*flags(*stage), f"--checkpoint={checkpoints}", "--save-every=1", "--resume"])
    for saved in checkpoints.glob("step-*"):
        if int(saved.name.removeprefix("step-")) > last:
            shutil.rmtree(saved)
    return {step: loss for step, loss in losses.items() if step <= last}


def run(programs, quick=False):
    for stages in CASES[:1] if quick else CASES:
        with tempfile.TemporaryDirectory() as folder:
            whole = curve(programs, folder, flags(*stages[0]))
            checkpoints, resumed = pathlib.Path(folder) / "checkpoints", {}
            checkpoints.mkdir()
            for stage, last in zip(stages, saved_steps(stages)):
                losses = stage_losses(programs, folder, checkpoints, stage, last)
                assert list(losses) == list(range(len(resumed) + 1, last + 1)), f"resumed at the wrong step: {list(losses)}"
                resumed.update(losses)
            assert list(resumed) == list(whole)
            case = " -> ".join(name(*stage) for stage in stages)
            yield at_most("resume", case, max(differences(resumed, whole)), BOUND, "nats")
