"""The host's cost of sharding, over the same model unsharded, a group: forward + backward, on one rank and on 8 and 64 pretended ones."""
import contextlib
from statistics import median

from .processes import Ranks, interleaved
from .row import at_least_ratio, without_bound

GROUPS, PARAMETERS, MORE_PARAMETERS = 25, 9, 45
ROUNDS, WARM_UP = 60, 5
# Where FSDP2 takes 450 us a group: 8 us a group, and 0.5 us for each further parameter. Both divide FSDP2's whole group.
GROUP_BOUND, PARAMETER_BOUND = 450 / 8, 450 / 0.5
LEAST = 0.01  # us: a difference below was lost in noise
RANKS_BOUND = 10  # on many ranks
REPORT_BOUND = 1 / 1.005  # of a step without one


def run(programs, quick=False):
    rounds = 20 if quick else ROUNDS
    ours, peer = costs(programs, 1, rounds)
    case = f"{GROUPS} groups of {PARAMETERS} small parameters, a group"
    yield at_least_ratio("overhead", f"{case}, ragged", ours["ragged"], peer["group"], "us", GROUP_BOUND)
    yield without_bound("overhead", f"{case}, per-parameter", ours["per-parameter"], peer["group"], "us")
    yield at_least_ratio("overhead", "a further parameter, beside FSDP2's group of 9", ours["further"], peer["group"], "us",
                         PARAMETER_BOUND)
    yield without_bound("overhead", "a further parameter, beside FSDP2's", ours["further"], peer["further"], "us")
    on, off = report_cost(programs, rounds)
    yield at_least_ratio("overhead", f"8 pretended ranks, a step of {case.split(',')[0]} with a report, against without", on, off, "us", REPORT_BOUND)
    for ranks in (8, 64):
        ours, peer = costs(programs, ranks, max(5, rounds // 4))
        for layout in ("ragged", "per-parameter"):
            case = f"{ranks} pretended ranks, a group of 9, {layout}"
            yield at_least_ratio("overhead", case, ours[layout], peer["group"], "us", RANKS_BOUND)


def report_cost(programs, rounds):
    """Microseconds of a step with a report, and without."""
    with Ranks(programs.ours("measure_overhead") + ["8"], 1) as job:
        job.wait_until_ready()
        names = ("ragged", "ragged with a report")
        seconds = interleaved(3 * rounds, WARM_UP, {name: lambda name=name: job.ask(name)[0] for name in names})
    off = median(seconds["ragged"])
    return 1e6 * (off + median(on - off for on, off in zip(seconds["ragged with a report"], seconds["ragged"]))), 1e6 * off


def costs(programs, ranks, rounds):
    """Microseconds a group, and of a further parameter in it: ours, by layout, and FSDP2's."""
    with contextlib.ExitStack() as stack:
        def started(command, parameters=PARAMETERS):
            job = stack.enter_context(Ranks(command + [str(ranks), str(parameters)], 1))
            job.wait_until_ready()
            return job

        jobs = {"ours": started(programs.ours("measure_overhead")),
                "more": started(programs.ours("measure_overhead"), MORE_PARAMETERS),
                "peer": started(programs.peer("measure_overhead.py")),
                "more of peer": started(programs.peer("measure_overhead.py"), MORE_PARAMETERS)}
        asked = [("ours", name) for name in ("plain", "ragged", "per-parameter")]
        asked += [("more", name) for name in ("plain", "ragged")]
        asked += [(job, name) for job in ("peer", "more of peer") for name in ("plain", "sharded")]
        seconds = interleaved(rounds, WARM_UP, {key: lambda key=key: jobs[key[0]].ask(key[1])[0] for key in asked})

    def cost(job, name):
        """What sharding added in a round, in the median: from round to round the machine's speed differs by more."""
        return 1e6 * median(sharded - plain for sharded, plain in zip(seconds[job, name], seconds[job, "plain"])) / GROUPS

    def further(more, group):
        return max((more - group) / (MORE_PARAMETERS - PARAMETERS), LEAST)

    ours = {layout: max(cost("ours", layout), LEAST) for layout in ("ragged", "per-parameter")}
    ours["further"] = further(cost("more", "ragged"), ours["ragged"])
    group = cost("peer", "sharded")
    return ours, {"group": group, "further": further(cost("more of peer", "sharded"), group)}
