"""The host's cost of sharding at world size 1, over the same model unsharded, a group: forward + backward."""
from statistics import median

from .processes import Ranks, interleaved
from .row import at_most

GROUPS = 25
ROUNDS, WARM_UP = 60, 5
BOUND = 40.0  # microseconds


def run(programs, quick=False):
    with Ranks(programs.ours("measure_overhead"), 1) as ours, Ranks(programs.peer("measure_overhead.py"), 1) as peer:
        ours.wait_until_ready()
        peer.wait_until_ready()
        measurements = {("ours", name): lambda name=name: ours.ask(name)[0] for name in ("plain", "ragged", "per-parameter")}
        measurements.update({("peer", name): lambda name=name: peer.ask(name)[0] for name in ("plain", "sharded")})
        seconds = interleaved(20 if quick else ROUNDS, WARM_UP, measurements)

    def cost(side, name):
        """What sharding added in a round, in the median: from round to round the machine's speed differs by more."""
        return 1e6 * median(sharded - plain for sharded, plain in zip(seconds[side, name], seconds[side, "plain"])) / GROUPS

    case = f"{GROUPS} groups of 9 small parameters, a group"
    return [at_most("overhead", f"{case}, {layout}", cost("ours", layout), BOUND, "us", cost("peer", "sharded"))
            for layout in ("ragged", "per-parameter")]
