"""Collectives between ranks of one host: ours beside c10d's gloo process group, in the same processes, and beside Open MPI."""
import json
import os
import pathlib
import shutil
import tempfile
from statistics import median

from .processes import PEER
from .processes import run as run_program
from .row import at_least_ratio, at_most, without_bound

LARGE, SMALL = 64 << 20, 4 << 10  # bytes
OVER_GLOO = {"all_gather": 8, "reduce_scatter": 10, "all_reduce": 4}  # with 64 MiB
OVER_MPI = {"all_gather": 1, "reduce_scatter": 4, "all_reduce": 3}
OF_A_COPY = 0.6  # of its speed, with 64 MiB on 2 ranks
MICROSECONDS = {2: 3, 4: 60}  # of a 4 KiB all-reduce, and of a barrier


def run(programs, quick=False):
    with tempfile.TemporaryDirectory() as folder:
        mpi = built_for_mpi(pathlib.Path(folder))
        for ranks in (2,) if quick else (2, 4):
            yield from rows_of(programs, mpi, ranks, rounds=1 if quick else 5, iterations=5 if quick else 30)


def built_for_mpi(folder):
    """The peer's program, where Open MPI is installed."""
    if not shutil.which("mpicc") or not shutil.which("mpirun"):
        return None
    program = folder / "mpi_collectives"
    run_program(["mpicc", "-O3", "-o", str(program), str(PEER / "mpi_collectives.c")], timeout=60)
    return program


def seconds_of_ours(programs, ranks, iterations):
    command = programs.ours("collectives_bench") + ["--ranks", str(ranks), "--iterations", str(iterations)]
    lines = [json.loads(line) for line in run_program(command, timeout=600).splitlines()]
    return {(line["collective"], line["bytes"], key): line[key]
            for line in lines for key in ("ours", "shared", "c10d", "copy") if key in line}


def seconds_of_mpi(program, ranks, iterations):
    """Over shared memory alone; ranks may outnumber the cores."""
    options = ["--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,vader"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    lines = run_program(["mpirun", *options, "-n", str(ranks), str(program), str(LARGE), str(iterations)], timeout=600).splitlines()
    return {(line["collective"], LARGE, "mpi"): line["seconds"] for line in map(json.loads, lines)}


def rows_of(programs, mpi, ranks, rounds, iterations):
    seconds = {}
    for _ in range(rounds):  # in turn, so that all meet the same machine
        found = seconds_of_ours(programs, ranks, iterations)
        if mpi:
            found.update(seconds_of_mpi(mpi, ranks, max(3, iterations // 3)))
        for key, value in found.items():
            seconds.setdefault(key, []).append(value)
    times = {key: median(values) for key, values in seconds.items()}
    for name, bound in OVER_GLOO.items():
        case = f"{ranks} ranks, {name} of 64 MiB"
        own, shared, gloo, copy = (1e3 * times[name, LARGE, key] for key in ("ours", "shared", "c10d", "copy"))
        yield at_least_ratio("collectives", f"{case}, beside gloo", shared, gloo, "ms", bound)
        yield without_bound("collectives", f"{case}, in the program's own memory", own, gloo, "ms")
        if mpi:
            yield at_least_ratio("collectives", f"{case}, beside Open MPI", shared, 1e3 * times[name, LARGE, "mpi"], "ms", OVER_MPI[name])
        if ranks == 2 and name != "all_reduce":
            yield at_least_ratio("collectives", f"{case}, beside a copy of it on each rank", shared, copy, "ms", OF_A_COPY)
    for name, size in (("all_reduce", SMALL), ("barrier", 0)):
        own, gloo = (1e6 * times[name, size, key] for key in ("ours", "c10d"))
        yield at_most("collectives", f"{ranks} ranks, {name}{' of 4 KiB' if size else ''}", own, MICROSECONDS[ranks], "us", gloo)
