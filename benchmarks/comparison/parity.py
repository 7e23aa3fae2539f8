"""Loss curves of 20 AdamW steps with clipping: ours, one unsharded process, and Python's FSDP2."""
import pathlib
import tempfile

from .row import at_most
from .training_runs import STEPS, curve, differences, peer_curve

FP32_BOUND, BF16_BOUND, BF16_MEAN_BOUND = 1e-5, 2e-2, 5e-3
LAYOUTS = ("ragged", "per-parameter")


def cases(quick):
    """Ranks and flags that both programs know."""
    if quick:
        return [(2, ["--strategy=full"])]
    worlds = (1, 2, 3, 4)
    return [*((ranks, ["--strategy=full"]) for ranks in worlds), (4, ["--strategy=hybrid", "--mesh=2x2"]),
            *((ranks, ["--strategy=no-shard"]) for ranks in worlds)]


def name(ranks, flags, layout):
    return f"{ranks} ranks, {' '.join(flag.split('=')[1] for flag in flags)}, {layout}"


def fp32_rows(programs, folder, initial, unsharded, quick):
    for ranks, flags in cases(quick):
        peer = peer_curve(programs, initial, ranks, flags)
        for layout in LAYOUTS:
            ours = curve(programs, folder, [f"--ranks={ranks}", f"--layout={layout}", *flags])
            assert len(ours) == len(peer) == STEPS
            case = f"fp32, {name(ranks, flags, layout)}"
            yield at_most("parity", case + ": against one process", max(differences(ours, unsharded)), FP32_BOUND, "nats",
                          peer=max(differences(peer, unsharded)))
            yield at_most("parity", case + ": against Python's FSDP2", max(differences(ours, peer)), FP32_BOUND, "nats")


def bf16_rows(programs, folder, initial, quick):
    for ranks, flags in cases(quick):
        for reduce in ("fp32", "bf16"):
            shared = [*flags, "--precision=bf16", f"--reduce-precision={reduce}"]
            peer = peer_curve(programs, initial, ranks, shared)
            for layout in LAYOUTS:
                ours = curve(programs, folder, [f"--ranks={ranks}", f"--layout={layout}", *shared])
                apart = differences(ours, peer)
                case = f"bf16, reduced in {reduce}, {name(ranks, flags, layout)}: against Python's FSDP2"
                yield at_most("parity", case + ", a step", max(apart), BF16_BOUND, "nats")
                yield at_most("parity", case + f", mean of {STEPS}", sum(apart) / len(apart), BF16_MEAN_BOUND, "nats")


def run(programs, quick=False):
    with tempfile.TemporaryDirectory() as folder:
        initial = pathlib.Path(folder) / "initial"
        unsharded = curve(programs, folder, ["--strategy=none", f"--dump-initial={initial}"])
        yield from fp32_rows(programs, folder, initial, unsharded, quick)
        yield from bf16_rows(programs, folder, initial, quick)
