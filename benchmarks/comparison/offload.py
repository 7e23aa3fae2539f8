"""A model with four times the state of the memory that it is given, offloaded to files, against the same model in memory.

The training runs in a control group of Linux (v1 or v2) where this process may make one, with the page cache counted in; else under a
limit of its data segment, which does not count pages of files. Between the steps dd writes and reads a file beside the training's, past
the page cache as the training does.
"""
import contextlib
import os
import pathlib
import subprocess
import tempfile
import time
from functools import partial
from statistics import median

from .processes import ROOT, Failure, Ranks
from .row import Row, at_least_ratio, at_most, without_bound

STEPS, BLOCKS, WIDTH = 20, 64, 512
STATE_OVER_MEMORY = 4
READ, WRITTEN = 16, 12  # bytes a parameter that an AdamW step reads: weight, gradient, two averages; and writes: all but the gradient
BANDWIDTH = 0.7  # of dd's
GROUPS_V1, GROUPS_V2 = pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")


def limited(command, group, limit):
    """The command with so many bytes of memory. How it is limited, for people."""
    controllers = GROUPS_V2 / "cgroup.controllers"
    version_2 = controllers.exists() and "memory" in controllers.read_text()
    folder = (GROUPS_V2 if version_2 else GROUPS_V1) / group
    try:
        folder.mkdir()
        (folder / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(limit))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return ["sh", "-c", f'ulimit -d {limit // 1024} && exec "$@"', "sh", *command], None
    return ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh", *command], folder


def remove(folder):
    for _ in range(50):  # a process that has ended leaves its group soon after
        with contextlib.suppress(OSError):
            return folder.rmdir()
        time.sleep(0.1)


def peak_of(group):
    """The most that a control group has taken, where there is one that says so."""
    for name in ("memory.max_usage_in_bytes", "memory.peak") if group else ():
        if (group / name).exists():
            return int((group / name).read_text())
    return None


def dd(mebibytes, *arguments):
    """Bytes a second."""
    command = ["dd", *arguments, "bs=1M", f"count={mebibytes}", "status=none"]
    begin = time.perf_counter()
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0:
        raise Failure(f"`{' '.join(command)}` failed")
    return mebibytes * 2**20 / (time.perf_counter() - begin)


def dd_write(file, mebibytes):
    return dd(mebibytes, "if=/dev/zero", f"of={file}", "oflag=direct", "conv=notrunc")


def dd_read(file, mebibytes):
    return dd(mebibytes, f"if={file}", "of=/dev/null", "iflag=direct")


def run(programs, quick=False):
    blocks, steps, mebibytes = (8, 4, 64) if quick else (BLOCKS, STEPS, 256)
    program = programs.ours("measure_offload")
    (ROOT / "build").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="compare-offload-")))
        arguments = [str(blocks), str(WIDTH)]
        with Ranks(program + [""] + arguments, 1) as memory:
            memory.wait_until_ready()
            expected = [memory.ask("step")[0]["loss"] for _ in range(steps)]
            parameters = memory.ask("parameter_bytes")[0] / 4
        limit = int(16 * parameters / STATE_OVER_MEMORY)
        if quick:
            limit = max(limit, 512 << 20)  # the program alone takes more than a part of a small model
        command, group = limited(program + [str(folder)] + arguments, f"tessera-compare-{os.getpid()}", limit)
        if group:
            stack.callback(remove, group)
        with Ranks(command, 1, timeout=600) as files:
            files.wait_until_ready()
            file = folder / "dd"
            dd_write(file, mebibytes)
            rounds = []
            for step in range(steps):
                answer = files.ask("step")[0]
                rounds.append((answer, dd_write(file, mebibytes), dd_read(file, mebibytes)))
            peak = peak_of(group)
    how = "cgroup" if group else "data segment"
    case = f"{16 * parameters / 2**20:.0f} MiB of state, {limit / 2**20:.0f} MiB of memory ({how}), {steps} steps"
    losses = [answer["loss"] for answer, _, _ in rounds]
    yield at_most("offload", f"{case}: largest difference of the losses", max(abs(a - b) for a, b in zip(losses, expected)), 0, "")
    rounds = rounds[1:]  # the first step creates the state
    ours = median(answer["optimizer"] for answer, _, _ in rounds)
    peer = median(parameters * (READ / read + WRITTEN / write) for _, write, read in rounds)
    beside_dd = without_bound if quick else partial(at_least_ratio, smallest=BANDWIDTH)
    yield beside_dd("offload", "an optimizer step, beside dd for its bytes", ours, peer, "s")
    if peak:
        yield at_most("offload", "memory at the peak, with the page cache", peak / 2**20, limit / 2**20, "MiB")
    for part in ("forward", "backward"):
        yield Row("offload", part, median(answer[part] for answer, _, _ in rounds), None, "s")
