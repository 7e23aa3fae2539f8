"""Collectives of a step, from the counters: all-gathers and reduce-scatters a group, and the all-reduces of clipping."""
from .processes import Failure, Ranks
from .row import equal

MODEL = ["--width=32", "--heads=2", "--sequence=16", "--batch=1"]
LAYOUTS = ("ragged", "per-parameter")


def count(programs, ranks, layers, *flags):
    """The counts of rank 0's third step, by part."""
    with Ranks(programs.ours("measure_step") + MODEL + [f"--layers={layers}", *flags], ranks) as job:
        job.wait_until_ready()
        for _ in range(2):
            job.ask("step")
        answers = job.ask("count")
    if any(answer != answers[0] for answer in answers):
        raise Failure(f"the ranks' counts differ: {answers}")
    return answers[0]


def of_training(counts, kind):
    return counts["forward"][kind] + counts["backward"][kind]


def label(ranks, flags):
    return ", ".join([f"{ranks} rank{'s' if ranks > 1 else ''}", *(flag.lstrip("-") for flag in flags)])


def a_step_and_group(programs, ranks, kinds, *flags):
    """With one block there are two groups, the root's and the last block's. Every further block adds one between them."""
    two, three, four = (count(programs, ranks, layers, *flags) for layers in (1, 2, 3))
    for kind, between, ends in kinds:
        added = [of_training(b, kind) - of_training(a, kind) for a, b in ((two, three), (three, four))]
        name = f"{kind}, {label(ranks, flags)}"
        yield equal("collectives-count", f"{name}: a block but the last", added[0], between, "a step")
        yield equal("collectives-count", f"{name}: another such block", added[1], between, "a step")
        yield equal("collectives-count", f"{name}: root and last block together", of_training(two, kind), ends, "a step")


def run(programs, quick=False):
    for layout in LAYOUTS:
        flag = f"--layout={layout}"
        for ranks in (2,) if quick else (2, 3, 4):
            yield from a_step_and_group(programs, ranks, [("all_gather", 2, 2), ("reduce_scatter", 1, 2)], flag)
        yield from a_step_and_group(programs, 2, [("all_gather", 1, 2), ("reduce_scatter", 1, 2)], flag, "--reshard-after-forward=false")
        if not quick:
            yield from a_step_and_group(programs, 4, [("all_gather", 2, 2), ("reduce_scatter", 1, 2), ("all_reduce", 1, 2)], flag,
                                        "--strategy=hybrid", "--mesh=2x2")
        alone = count(programs, 1, 3, flag)
        calls = sum(sum(part.values()) for part in alone.values())
        yield equal("collectives-count", f"all kinds, {label(1, [flag])}", calls, 0, "a step")


def run_clip(programs, quick=False):
    cases = [(2, []), (3, []), (4, []), (4, ["--strategy=hybrid", "--mesh=2x2"])]
    for layout in LAYOUTS:
        for ranks, flags in cases[:1] if quick else cases:
            for layers in (1, 4):
                clip = count(programs, ranks, layers, f"--layout={layout}", *flags)["clip"]
                case = label(ranks, [f"layers={layers}", f"layout={layout}", *flags])
                yield equal("clip", case, clip["all_reduce"], 1, "all-reduces")
                yield equal("clip", case, sum(clip.values()) - clip["all_reduce"], 0, "other collectives")
