"""Save and load of 1 GiB over 2 ranks, against torch.distributed.checkpoint and against dd; the stall of a save in the background.

And what exports take of the host's memory.

All are asked in turns. Loads come from the page cache, where the saves leave the files.
"""
import os
import pathlib
import subprocess
import tempfile
import time
from statistics import median

from .processes import ROOT, Failure, Ranks, interleaved
from .row import at_least_ratio, at_most, without_bound

RANKS = 2
MEBIBYTES, ROUNDS, WARM_UP = 1024, 7, 1
EXPORT_RANKS, EXPORT_ROUNDS = 4, 3


class Dd:
    """One dd a rank, each with its part of the bytes and an fsync at its end."""

    def __init__(self, folder, mebibytes):
        self.files = [folder / f"dd-{rank}" for rank in range(RANKS)]
        self.mebibytes = mebibytes

    def write(self):
        for file in self.files:
            file.unlink(missing_ok=True)
        os.sync()
        begin = time.perf_counter()
        writers = [subprocess.Popen(["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={self.mebibytes // RANKS}", "conv=fsync"],
                                    stderr=subprocess.DEVNULL) for file in self.files]
        if any([writer.wait() for writer in writers]):
            raise Failure("dd failed")
        return time.perf_counter() - begin


def slowest(job, command):
    return lambda: max(job.ask(command))


def run(programs, quick=False):
    mebibytes, rounds = (64, 3) if quick else (MEBIBYTES, ROUNDS)
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="compare-checkpoint-") as folder:
        folder = pathlib.Path(folder)
        for side in ("ours", "peer", "dd"):
            (folder / side).mkdir()
        dd = Dd(folder / "dd", mebibytes)
        ours_command = programs.ours("measure_checkpoint") + [str(folder / "ours"), str(mebibytes)]
        peer_command = programs.peer("measure_checkpoint.py") + [str(folder / "peer"), str(mebibytes)]
        with Ranks(ours_command, RANKS) as ours, Ranks(peer_command, RANKS) as peer:
            ours.wait_until_ready()
            peer.wait_until_ready()
            names = ("save", "load", "load-unverified", "copy", "stall")
            measurements = {"dd": dd.write}
            measurements.update({("ours", name): slowest(ours, name) for name in names})
            measurements.update({("peer", name): slowest(peer, name) for name in ("save", "load", "stall")})
            values = interleaved(rounds, WARM_UP, measurements)
    seconds = {name: median(turns) for name, turns in values.items()}
    case = f"{mebibytes} MiB, {RANKS} ranks"

    def row(name, ours, peer, smallest):
        return at_least_ratio("checkpoint", f"{case}: {name}", seconds[ours], seconds[peer], "s", smallest)

    return [
        row("save, against dd with fsync", ("ours", "save"), "dd", 0.9),
        row("save, against PyTorch's DCP", ("ours", "save"), ("peer", "save"), 1.0),
        row("load with verification, against PyTorch's DCP", ("ours", "load"), ("peer", "load"), 1.0),
        row("load without verification, against PyTorch's DCP", ("ours", "load-unverified"), ("peer", "load"), 1.5),
        at_most("checkpoint", f"{case}: stall of a background save over the copy of the shards",
                seconds["ours", "stall"] / seconds["ours", "copy"], 1.3, "x"),
        without_bound("checkpoint", f"{case}: stall of a background save, against PyTorch's async_save", seconds["ours", "stall"],
                      seconds["peer", "stall"], "s"),
    ]


def run_exports(programs, quick=False):
    mebibytes, rounds = (64, 1) if quick else (MEBIBYTES, EXPORT_ROUNDS)
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="compare-export-") as folder:
        with Ranks(programs.ours("measure_checkpoint") + [folder, str(mebibytes)], EXPORT_RANKS) as job:
            job.wait_until_ready()
            for command in ("export-torch", "export-hugging-face"):
                turns = [job.ask(command) for _ in range(rounds)]
                peak = max(answer["peak_bytes"] for turn in turns for answer in turn)
                seconds = median(max(answer["seconds"] for answer in turn) for turn in turns)
                yield at_most("export", f"{mebibytes} MiB, {EXPORT_RANKS} ranks: {command}, host memory beside the shards "
                              f"(median {seconds:.2f} s)", peak / 2**20, 64, "MiB a rank")
