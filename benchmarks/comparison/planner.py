"""Steps that the planner predicts from a machine that was measured on 2 ranks, and fitted to the steps of two settings more, against the
steps of real ranks, and its choice against the fastest one measured."""
import json
import os
from statistics import median

from .prediction import crowded
from .processes import Ranks, interleaved
from .row import at_most, without_bound

MEASURED_RANKS = 2
ROUNDS, WARM_UP = 10, 3
STEP_BOUND, CHOICE_BOUND = 0.15, 0.05  # of the step; of the rows a second
LAYERS, WIDTH = 4, 256


def run(programs, quick=False):
    machine = measured_machine(programs)
    yield without_bound("planner", "rate of matrix products, measured on 2 ranks", 1e-9 * machine["flops_per_second"]["fp32"],
                        None, "GFLOPS")
    yield without_bound("planner", "1 / beta, measured on 2 ranks", 1e-9 / max(machine["in_host"]["beta"], 1e-15), None, "GB/s")
    for ranks in (2, 4):
        yield from rows_of(programs, on(machine, ranks), ranks, settings_of(ranks)[:3] if quick else settings_of(ranks), 3 if quick else ROUNDS)


def measured_machine(programs):
    with Ranks(programs.ours("measure_planned_step") + ["machine"], MEASURED_RANKS) as job:
        return json.loads(job.lines(ranks=[0])[0])


def on(machine, ranks):
    """The same host with more ranks, which share its cores, and so its rates and links, once there are more of them than cores."""
    share = max(1, ranks / max(os.cpu_count(), MEASURED_RANKS))
    link = {key: value for key, value in machine["in_host"].items() if key != "algorithm"}
    return {**machine, "ranks_a_host": ranks, "in_host": crowded(link, ranks),
            "flops_per_second": {name: value / share for name, value in machine["flops_per_second"].items()},
            "memory_bytes_per_second": machine["memory_bytes_per_second"] / share, "launch_seconds": machine["launch_seconds"] * share,
            "dtensor_seconds": machine["dtensor_seconds"] * share}


def settings_of(ranks):
    """Twelve: strategies, rows, recomputation, optimizers and tensor parallelism."""
    full = {"shard": ranks, "layers": LAYERS, "width": WIDTH, "rows": 2}
    settings = [{**full, **more} for more in (
        {}, {"rows": 1}, {"rows": 4}, {"recompute": True}, {"strategy": "zero-2"}, {"strategy": "zero-1", "rows": 4}, {"accumulation": 2},
        {"optimizer": "SGD"}, {"optimizer": "Lion"}, {"shard": ranks // 2, "tp": 2})]
    whole = {**full, "shard": 1, "replicate": ranks, "strategy": "no-shard"}
    return settings + [whole, {**whole, "rows": 4}]


def measured_seconds(command, settings, ranks, rounds):
    with Ranks(command + ["run", json.dumps(settings)], ranks) as job:
        job.wait_until_ready()
        turns = interleaved(rounds, WARM_UP, {"step": lambda: job.ask("step")})["step"]
    return median(max(rank["step"] for rank in turn) for turn in turns)


def fitted_machine(command, machine, ranks, rounds):
    """Two settings that are none of `settings_of`: one that mostly computes, and one that mostly sends."""
    whole = {"shard": ranks, "layers": LAYERS, "width": WIDTH}
    words = []
    for settings in ({**whole, "rows": 6}, {**whole, "rows": 1, "recompute": True}):
        words += [json.dumps(settings), str(measured_seconds(command, settings, ranks, rounds))]
    with Ranks(command + ["fit", json.dumps(machine)] + words, 1) as job:
        return json.loads(job.lines()[0])


def rows_of(programs, machine, ranks, settings, rounds):
    command = programs.ours("measure_planned_step")
    fitted = fitted_machine(command, machine, ranks, rounds)
    for name, rate in (("rates", lambda one: one["efficiency"] * one["flops_per_second"]["fp32"]), ("1 / beta", lambda one: 1 / max(one["in_host"]["beta"], 1e-15))):
        yield without_bound("planner", f"{ranks} ranks: fitted {name} of the measured ones", rate(fitted) / rate(machine), None, "x")
    with Ranks(command + ["predict", json.dumps(fitted)] + list(map(json.dumps, settings)), 1) as job:
        predicted = [json.loads(job.lines()[0]) for _ in settings]
    measured = [measured_seconds(command, each, ranks, rounds) for each in settings]
    for one, seconds in zip(predicted, measured, strict=True):
        case = f"{ranks} ranks, {one['settings']['text']}"
        yield without_bound("planner", f"{case}: predicted beside measured", 1e3 * one["seconds"], 1e3 * seconds, "ms")
        yield at_most("planner", f"{case}: error", abs(one["seconds"] / seconds - 1), STEP_BOUND, "of the step")
    speeds = [one["global_rows"] / seconds for one, seconds in zip(predicted, measured, strict=True)]
    choice = max(range(len(predicted)), key=lambda i: predicted[i]["rows_per_second"])
    yield at_most("planner", f"{ranks} ranks: the choice behind the fastest measured", max(speeds) / speeds[choice] - 1, CHOICE_BOUND,
                  "of its rows a second")
