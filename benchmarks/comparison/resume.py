"""A run on 4 ranks that is resumed on 2, against the same run without interruption."""
import pathlib
import shutil
import tempfile

from .row import at_most
from .training_runs import STEPS, curve, differences

BOUND = 1e-5
HALF = STEPS // 2
CASES = (("ragged", "ragged"), ("per-parameter", "per-parameter"), ("ragged", "per-parameter"))


def run(programs, quick=False):
    for before, after in CASES[:1] if quick else CASES:
        with tempfile.TemporaryDirectory() as folder:
            saved, interrupted = pathlib.Path(folder) / "saved", pathlib.Path(folder) / "interrupted"
            whole = curve(programs, folder, ["--ranks=4", f"--layout={before}", f"--checkpoint={saved}", f"--save-every={HALF}"])
            interrupted.mkdir()
            shutil.copytree(saved / f"step-{HALF:06}", interrupted / f"step-{HALF:06}")
            rest = curve(programs, folder, ["--ranks=2", f"--layout={after}", f"--checkpoint={interrupted}", "--resume"])
            assert list(rest) == list(range(HALF + 1, STEPS + 1)), f"resumed at the wrong step: {list(rest)}"
            yield at_most("resume", f"4 ranks {before} -> 2 ranks {after}", max(differences(rest, whole)), BOUND, "nats")
