"""Collectives between two hosts with two ranks each, over a slow link: hierarchical beside flat, both over our gloo, and c10d's gloo."""
import json
import shlex
from statistics import median

from .row import at_least_ratio, without_bound
from .two_hosts import LINK, on_both_hosts

BYTES = 16 << 20
BOUND = 1.8


def run(programs, quick=False):
    seconds = {}
    for _ in range(1 if quick else 5):  # in turn, so that all meet the same machine
        for transport in ("automatic", "gloo"):
            for name, times in seconds_of(programs, transport, 3 if quick else 20).items():
                seconds.setdefault((name, transport), []).append(times["ours"])
                seconds.setdefault((name, "c10d"), []).append(times["c10d"])
    times = {key: 1e3 * median(values) for key, values in seconds.items()}
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        case, ours = f"2 hosts x 2 ranks, {LINK}, {name} of 16 MiB", times[name, "automatic"]
        yield at_least_ratio("hosts", f"{case}, beside flat", ours, times[name, "gloo"], "ms", BOUND)
        yield without_bound("hosts", f"{case}, beside c10d's gloo", ours, times[name, "c10d"], "ms")


def seconds_of(programs, transport, iterations):
    program = shlex.join(programs.ours("collectives_bench") + ["--bytes", str(BYTES), "--iterations", str(iterations)])
    output = on_both_hosts(program, ranks_of_a_host=2, variables={"TESSERA_TRANSPORT": transport})
    return {line["collective"]: line for line in map(json.loads, output.splitlines())}
