"""PyTorch's own DDP and FSDP2, in Python on 2 ranks: a train step with our torch.distributed backend, against the same on gloo."""
from .processes import Failure
from .row import at_least_ratio, without_bound
from .train import MODELS, RANKS, Ranked, measure

ROUNDS = 20
OVER_GLOO = 1.2  # gloo's time over ours, at least
STRATEGIES = {"ddp": "DDP", "full": "FSDP2"}


def run(programs, quick=False):
    for model in MODELS:
        for strategy, name in STRATEGIES.items():
            yield from rows_of(programs, model, strategy, name, 3 if quick else ROUNDS)


def rows_of(programs, model, strategy, name, rounds):
    command = programs.peer("measure_step.py") + model.flags + ["--batch=1", f"--strategy={strategy}"]
    ours = command + ["--backend=tessera", f"--package={package(programs)}"]
    jobs = {"ours": Ranked(ours), "gloo": Ranked(command)}
    if strategy == "ddp":
        jobs["apart"] = Ranked(programs.peer("measure_step.py") + model.flags + ["--batch=1", "--strategy=none"], apart=True)
    if strategy == "full":
        jobs["shared"] = Ranked(ours + ["--shared-buffers"])
    milliseconds = measure(jobs, rounds)
    case = f"{name} of PyTorch, {RANKS} ranks, {model.name}, batch 1"
    yield at_least_ratio("python", case, milliseconds("ours", "step"), milliseconds("gloo", "step"), "ms", OVER_GLOO)
    for part in ("forward", "backward"):
        yield without_bound("python", f"{case}: {part}", milliseconds("ours", part), milliseconds("gloo", part), "ms")
    if strategy == "ddp":
        yield without_bound("python", f"{case}: ranks that send nothing, which no backend surpasses", milliseconds("apart", "step"),
                            milliseconds("gloo", "step"), "ms")
    if strategy == "full":
        yield without_bound("python", f"{case}, buffers in shared memory", milliseconds("shared", "step"), milliseconds("gloo", "step"),
                            "ms")


def package(programs):
    folder = programs.bin.parent / "python"
    if not folder.exists():
        raise Failure(f"there is no {folder}; build it with `cmake --build --preset release --target tessera_backend`")
    return folder
