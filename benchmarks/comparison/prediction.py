"""A step of 2 and of 4 ranks, predicted by a simulated rank from links that were fitted on 2 ranks, against the same step on real ranks."""
import contextlib
import json
import os
from statistics import median

from .processes import Ranks, interleaved
from .processes import run as run_program
from .row import at_most, without_bound

FITTED_RANKS = 2
ROUNDS, WARM_UP = 20, 3
BOUND = 0.15  # of the step
FITTED = ("all_gather", "reduce_scatter")
SMALLEST, LARGEST = 4 << 10, 16 << 20  # bytes: what a group of these models sends
MODELS = {"width 512, 8 layers": ["--layers=8", "--width=512", "--heads=8", "--sequence=128", "--batch=1"],
          "width 64, 24 layers": ["--layers=24", "--width=64", "--heads=4", "--sequence=128", "--batch=1"]}


def run(programs, quick=False):
    alpha, beta = fit(programs, 10 if quick else 50)
    yield without_bound("prediction", "alpha, fitted on 2 ranks", 1e6 * alpha, 1e6 * alpha, "us")
    yield without_bound("prediction", "1 / beta, fitted on 2 ranks", 1e-9 / beta, 1e-9 / beta, "GB/s")
    for name, flags in MODELS.items():
        for ranks in (FITTED_RANKS, 4):
            predicted, measured = step_of(programs, flags, ranks, alpha, beta, 5 if quick else ROUNDS)
            case = f"{ranks} ranks, {name}"
            yield without_bound("prediction", f"{case}: predicted beside measured", 1e3 * predicted, 1e3 * measured, "ms")
            yield at_most("prediction", f"{case}: error", abs(predicted / measured - 1), BOUND, "of the step")


def fit(programs, iterations):
    """Alpha and beta of a ring of two: a collective of n bytes takes alpha + n / 2 * beta. The sum of squared relative errors is the least."""
    command = programs.ours("collectives_bench") + ["--ranks", str(FITTED_RANKS), "--iterations", str(iterations)]
    lines = [json.loads(line) for line in run_program(command, timeout=600).splitlines()]
    points = [(line["bytes"] / 2, line["shared"]) for line in lines
              if line["collective"] in FITTED and SMALLEST <= line["bytes"] <= LARGEST]
    ones = sum(1 / t**2 for _, t in points)
    bytes_ = sum(x / t**2 for x, t in points)
    squares = sum(x**2 / t**2 for x, t in points)
    times, products = sum(1 / t for _, t in points), sum(x / t for x, t in points)
    beta = max(0, (ones * products - bytes_ * times) / (ones * squares - bytes_**2))
    return max(0, (times - beta * bytes_) / ones), beta


def crowding(ranks):
    """Copies between ranks of one host are work of their cores. Ranks that share a core take their turns at that."""
    return max(1, ranks / os.cpu_count())


def step_of(programs, flags, ranks, alpha, beta, rounds):
    """Seconds: predicted, and measured in the median, of the ranks the slowest. As many simulated ranks run at a time as real ones, each in a
    job of its own, so that they find the cores, their caches and the memory as busy."""
    topology = json.dumps({"ranks": ranks, "ranks_per_node": ranks, "in_node": {"alpha": alpha, "beta": beta}})
    with contextlib.ExitStack() as stack:
        simulated = stack.enter_context(Ranks(programs.ours("measure_simulated_step") + [topology] + flags, ranks, apart=True))
        real = stack.enter_context(Ranks(programs.ours("measure_step") + flags, ranks))
        for job in (simulated, real):
            job.wait_until_ready()
        seconds = interleaved(rounds, WARM_UP, {"simulated": lambda: simulated.ask("step"), "real": lambda: real.ask("step")})
    # Nothing hides what is work of the cores: compute and communication add up.
    parts = [max(rank["compute"] + crowding(ranks) * rank["communication"] for rank in turn) for turn in seconds["simulated"]]
    return median(parts), median(max(rank["step"] for rank in turn) for turn in seconds["real"])
