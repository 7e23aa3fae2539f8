"""One rank on a CUDA device, beside Python's FSDP2 there and beside an unsharded model under autocast."""
import contextlib
from statistics import median

from .overhead import GROUPS, PARAMETERS
from .processes import Ranks, interleaved
from .row import at_least_ratio, at_most, without_bound

ROUNDS, WARM_UP = 20, 4
HOST_BOUND = 5
# About a billion parameters.
LAYERS, WIDTH, SEQUENCE, BATCH = 20, 2048, 1024, 4
SHARDED_BOUND = 0.98  # of the unsharded model's speed


@contextlib.contextmanager
def started(commands):
    """A rank of each command. They start at once, which takes most of the time."""
    with contextlib.ExitStack() as stack:
        jobs = {name: stack.enter_context(Ranks([str(word) for word in command], 1)) for name, command in commands.items()}
        for job in jobs.values():
            job.wait_until_ready()
        yield jobs


def run_host(programs, quick=False):
    for ranks in (1, 8):
        arguments = [ranks, PARAMETERS, "cuda"]
        with started({"ours": programs.ours("measure_overhead") + arguments,
                      "peer": programs.peer("measure_overhead.py") + arguments}) as jobs:
            yield from host_rows(jobs, ranks, 5 if quick else ROUNDS)


def run(programs, quick=False):
    sizes = [LAYERS, WIDTH, SEQUENCE, BATCH]
    commands = {kind: programs.ours("measure_device_step") + [kind, *sizes] for kind in ("sharded", "per-parameter", "autocast")}
    with started({**commands, "peer": programs.peer("measure_device_step.py") + sizes}) as jobs:
        yield from gpt_rows(jobs, 5 if quick else ROUNDS)


def host_rows(jobs, ranks, rounds):
    """What the host takes to launch forward and backward of small groups, and what sharding adds to that."""
    asked = [("ours", name) for name in ("plain", "ragged", "per-parameter")] + [("peer", name) for name in ("plain", "sharded")]
    seconds = interleaved(rounds, WARM_UP, {key: lambda key=key: jobs[key[0]].ask(key[1])[0] for key in asked})

    def added(job, name):
        return 1e6 * median(sharded - plain for sharded, plain in zip(seconds[job, name], seconds[job, "plain"])) / GROUPS

    case = f"{ranks} rank{'s that are pretended' if ranks > 1 else ''}, {GROUPS} groups of {PARAMETERS} small parameters"
    for layout in ("ragged", "per-parameter"):
        step, peer = 1e6 * median(seconds["ours", layout]), 1e6 * median(seconds["peer", "sharded"])
        yield at_least_ratio("gpu-host", f"{case}, {layout}: the host's time a step", step, peer, "us", HOST_BOUND)
        yield at_least_ratio("gpu-host", f"{case}, {layout}: what sharding adds to it, a group", added("ours", layout),
                             added("peer", "sharded"), "us", HOST_BOUND)
    yield without_bound("gpu-host", f"{case}: the host's time a step without sharding", 1e6 * median(seconds["ours", "plain"]),
                        1e6 * median(seconds["peer", "plain"]), "us")


def gpt_rows(jobs, rounds):
    answers = interleaved(rounds, WARM_UP, {name: lambda job=job: job.ask("step")[0] for name, job in jobs.items()})
    peak = {name: job.ask("peak")[0] / 2**30 for name, job in jobs.items()}

    def milliseconds(name, part):
        return 1e3 * median(answer[part] for answer in answers[name])

    case = f"GPT of 1e9 parameters in bf16, batch {BATCH} x {SEQUENCE}"
    for kind in ("sharded", "per-parameter"):
        step = milliseconds(kind, "device")
        yield at_least_ratio("gpu", f"{case}, {kind}: forward and backward, beside autocast", step, milliseconds("autocast", "device"),
                             "ms", SHARDED_BOUND)
        yield without_bound("gpu", f"{case}, {kind}: forward and backward, beside FSDP2", step, milliseconds("peer", "device"), "ms")
        yield without_bound("gpu", f"{case}, {kind}: the host's part", milliseconds(kind, "host"), milliseconds("peer", "host"), "ms")
        yield at_most("gpu", f"{case}, {kind}: peak memory", peak[kind], peak["peer"], "GiB", peak["peer"])
    yield without_bound("gpu", f"{case}: peak memory of autocast", peak["autocast"], peak["peer"], "GiB")
