"""Collectives between two hosts with two ranks each, over a slow link: hierarchical beside flat, both over our gloo, and c10d's gloo."""
import json
from statistics import median

from .processes import ROOT
from .processes import run as run_program
from .row import at_least_ratio, without_bound

BYTES = 16 << 20
LINK = ["--rate", "1gbit", "--delay", "1ms"]
BOUNDS = {"all_gather": 1.8, "all_reduce": 1.8}


def run(programs, quick=False):
    seconds = {}
    for _ in range(1 if quick else 5):  # in turn, so that all meet the same machine
        for transport in ("automatic", "gloo"):
            for name, times in seconds_of(programs, transport, 3 if quick else 20).items():
                seconds.setdefault((name, transport), []).append(times["ours"])
                seconds.setdefault((name, "c10d"), []).append(times["c10d"])
    times = {key: 1e3 * median(values) for key, values in seconds.items()}
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        case, ours = f"2 hosts x 2 ranks, 1 Gbit/s, 1 ms, {name} of 16 MiB", times[name, "automatic"]
        if name in BOUNDS:
            yield at_least_ratio("hosts", f"{case}, beside flat", ours, times[name, "gloo"], "ms", BOUNDS[name])
        else:
            yield without_bound("hosts", f"{case}, beside flat", ours, times[name, "gloo"], "ms")
        yield without_bound("hosts", f"{case}, beside c10d's gloo", ours, times[name, "c10d"], "ms")


def seconds_of(programs, transport, iterations):
    program = " ".join(programs.ours("collectives_bench") + ["--bytes", str(BYTES), "--iterations", str(iterations)])
    ranks = f"for rank in 0 1; do LOCAL_RANK=$rank RANK=$((2 * {{host}} + rank)) {program} & done; wait"
    job = {"WORLD_SIZE": "4", "MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29533", "TESSERA_TRANSPORT": transport}
    command = ["env", *(f"{name}={value}" for name, value in job.items()), str(ROOT / "scripts" / "two-hosts"), *LINK, "sh", "-c", ranks]
    return {line["collective"]: line for line in map(json.loads, run_program(command, timeout=300).splitlines())}
