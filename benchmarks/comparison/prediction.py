"""A step of 2 and of 4 ranks of one host, and of 2 ranks on each of two hosts, predicted by simulated ranks from links that were fitted on 2
ranks, against the same step on real ranks."""
import contextlib
import json
import os
import pathlib
import shlex
import tempfile
from statistics import median

from .processes import Ranks, interleaved
from .processes import run as run_program
from .row import at_most, without_bound
from .two_hosts import LINK, on_both_hosts

FITTED_RANKS = 2
ROUNDS, WARM_UP = 20, 3
BOUND = 0.15  # of the step
FITTED = ("all_gather", "reduce_scatter")
SMALLEST, LARGEST = 4 << 10, 16 << 20  # bytes: what a group of these models sends
MODELS = {"width 512, 8 layers": ["--layers=8", "--width=512", "--heads=8", "--sequence=128", "--batch=1"],
          "width 64, 24 layers": ["--layers=24", "--width=64", "--heads=4", "--sequence=128", "--batch=1"]}


def run(programs, quick=False):
    iterations, rounds = (10, 5) if quick else (50, ROUNDS)
    in_node = fit(run_program(bench(programs, iterations) + ["--ranks", str(FITTED_RANKS)], timeout=600))
    yield from link_rows("one host", in_node)
    for name, flags in MODELS.items():
        for ranks in (FITTED_RANKS, 4):
            yield from rows(f"{ranks} ranks, {name}", *step_of_host(programs, flags, ranks, in_node, rounds))
    # Last, since network namespaces are not permitted everywhere.
    between = fit(on_both_hosts(beside_a_busy_core(shlex.join(bench(programs, iterations // 10))), ranks_of_a_host=1))
    yield from link_rows(f"two hosts, {LINK}", between)
    for name, flags in MODELS.items():
        yield from rows(f"2 hosts x 2 ranks, {name}", *step_of_hosts(programs, flags, in_node, between, rounds))


def link_rows(where, link):
    yield without_bound("prediction", f"alpha of {where}, fitted on 2 ranks", 1e6 * link["alpha"], 1e6 * link["alpha"], "us")
    if link["beta"] > 0:  # 0 where times do not grow with the bytes
        yield without_bound("prediction", f"1 / beta of {where}", 1e-9 / link["beta"], 1e-9 / link["beta"], "GB/s")


def rows(case, predicted, measured):
    yield without_bound("prediction", f"{case}: predicted beside measured", 1e3 * predicted, 1e3 * measured, "ms")
    yield at_most("prediction", f"{case}: error", abs(predicted / measured - 1), BOUND, "of the step")


def bench(programs, iterations):
    return programs.ours("collectives_bench") + ["--iterations", str(iterations)]


def beside_a_busy_core(command):
    """What carries messages between hosts needs their cores, on which in a step another rank of the host computes."""
    return f"(while :; do :; done) & busy=$!; {command}; status=$?; kill $busy; (exit $status)"


def fit(output):
    """The link of a ring of two: a collective of n bytes takes alpha + n / 2 * beta. The sum of squared relative errors is the least."""
    points = [(line["bytes"] / 2, line["shared"]) for line in map(json.loads, output.splitlines())
              if line["collective"] in FITTED and SMALLEST <= line["bytes"] <= LARGEST]
    ones = sum(1 / t**2 for _, t in points)
    bytes_ = sum(x / t**2 for x, t in points)
    squares = sum(x**2 / t**2 for x, t in points)
    times, products = sum(1 / t for _, t in points), sum(x / t for x, t in points)
    beta = max(0, (ones * products - bytes_ * times) / (ones * squares - bytes_**2))
    return {"alpha": max(0, (times - beta * bytes_) / ones), "beta": beta}


def crowded(link, ranks):
    """Copies between ranks of one host are work of their cores. Ranks that share a core take their turns at that."""
    factor = max(1, ranks / os.cpu_count())
    return {name: factor * value for name, value in link.items()}


def simulated_ranks(programs, flags, ranks, topology):
    """As many as there are real ones, each in a job of its own, so that they find the cores, their caches and the memory as busy."""
    text = json.dumps({"ranks": ranks, **topology})
    return Ranks(programs.ours("measure_simulated_step") + [text] + flags, ranks, apart=True)


def step_of_host(programs, flags, ranks, link, rounds):
    """Seconds: predicted, and measured, in the median, of the ranks the slowest."""
    with contextlib.ExitStack() as stack:
        topology = {"ranks_per_node": ranks, "in_node": crowded(link, ranks)}
        simulated = stack.enter_context(simulated_ranks(programs, flags, ranks, topology))
        real = stack.enter_context(Ranks(programs.ours("measure_step") + flags, ranks))
        for job in (simulated, real):
            job.wait_until_ready()
        seconds = interleaved(rounds, WARM_UP, {"simulated": lambda: simulated.ask("step"), "real": lambda: real.ask("step")})
    # Nothing hides what is work of the cores: compute and communication add up.
    parts = [max(rank["compute"] + rank["communication"] for rank in turn) for turn in seconds["simulated"]]
    return median(parts), median(max(rank["step"] for rank in turn) for turn in seconds["real"])


def step_of_hosts(programs, flags, in_node, between, rounds):
    """The same for two hosts with two ranks each. Compute hides what the link between them carries."""
    topology = {"ranks_per_node": 2, "in_node": crowded(in_node, 4), "between_nodes": between}
    with simulated_ranks(programs, flags, 4, topology) as simulated:
        simulated.wait_until_ready()
        seconds = interleaved(rounds, WARM_UP, {"simulated": lambda: simulated.ask("step")})
    predicted = median(max(rank["step"] for rank in turn) for turn in seconds["simulated"])
    with tempfile.TemporaryDirectory() as folder:
        program = shlex.join(programs.ours("measure_step") + flags)
        steps = f"printf 'step\\n%.0s' $(seq {WARM_UP + rounds})"
        on_both_hosts(f"{steps} | {program} > {shlex.quote(folder)}/$RANK", ranks_of_a_host=2)
        ranks = [[json.loads(line)["step"] for line in file.read_text().splitlines()[1 + WARM_UP:]]
                 for file in pathlib.Path(folder).iterdir()]
    return predicted, median(map(max, zip(*ranks, strict=True)))
