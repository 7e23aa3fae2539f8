"""What operators on DTensors cost over plain ones, beside Python's DTensor: warm calls, first calls, and AdamW steps; one rank."""
from statistics import median

from .processes import Ranks
from .row import at_least_ratio, at_most

# Command, case, the least ratio of Python's cost to ours.
WARM = [("add", "add", 4), ("detach", "detach", 4), ("mm", "mm", 4), ("mul_", "in-place mul", 4), ("view", "view", 4),
        ("cat", "cat of 20", 20), ("foreach_add", "foreach_add of 20", 3), ("redistribute", "redistribute over 2 dims, no data moved", 7)]
FIRST = [("first add", "first add", 8), *((f"first mm {dims}", f"first mm, {dims}-D mesh", least)
                                          for dims, least in ((1, 10), (2, 35), (3, 130), (4, 700)))]
ADAMW = [("adamw fused", "fused AdamW, 300 parameters"), ("adamw foreach", "foreach AdamW, 300 parameters")]
ADAMW_BOUND = 1.3  # times the step over plain tensors


def run(programs, quick=False):
    rounds = 2 if quick else 7
    with Ranks(programs.ours("measure_dispatch"), 1) as ours, Ranks(programs.peer("measure_dispatch.py"), 1) as peer:
        ours.wait_until_ready()
        peer.wait_until_ready()

        def measure(command, turns):
            """The medians of both sides' turns, [plain, DTensor]."""
            answers = [(ours.ask(command)[0], peer.ask(command)[0]) for _ in range(turns)]
            return [[median(answer[side][kind] for answer in answers) for kind in (0, 1)] for side in (0, 1)]

        for command, case, least in WARM + FIRST:
            (our_plain, our_time), (peer_plain, peer_time) = measure(command, rounds if (command, case, least) in WARM else 3)
            note = f"{case}, over plain ({our_plain:.2f} us in C++)"
            yield at_least_ratio("dispatch", note, max(our_time - our_plain, 0.01), peer_time - peer_plain, "us", least)
        for command, case in ADAMW:
            (our_plain, our_time), (peer_plain, peer_time) = measure(command, rounds)
            note = f"{case}, over plain ({our_plain:.0f} us in C++)"
            yield at_most("dispatch", note, our_time / our_plain, ADAMW_BOUND, "x", peer_time / peer_plain)
