"""all-MiniLM-L6-v2 in examples/embed_minilm: its embeddings and fine-tuning, against plain PyTorch and one process."""
import json
import pathlib
import tempfile

from .processes import ROOT, Failure, run as run_command
from .row import at_most

MODEL = ROOT / ".data" / "minilm"
SENTENCES, PAIRS = (ROOT / "examples" / "embed_minilm" / name for name in ("sentences.txt", "pairs.tsv"))
PIECES = ROOT / "tests" / "examples" / "fixtures" / "word_pieces.json"
BOUND = 1e-5
TRAINING = ["--steps=20", "--global-batch=12", "--lr=2e-5", "--seed=3"]
TIMEOUT = 600


def cases(quick):
    if quick:
        return [(2, ["--strategy=full"])]
    return [*((ranks, ["--strategy=full", f"--layout={layout}"]) for ranks in (1, 2, 4) for layout in ("ragged", "per-parameter")),
            (4, ["--strategy=hybrid", "--mesh=2x2"]), (2, ["--strategy=no-shard"]), (4, ["--strategy=no-shard"])]


def name(ranks, flags):
    return f"{ranks} ranks, {', '.join(flag.split('=')[1] for flag in flags)}"


def ours(programs, *flags):
    return run_command(programs.ours("embed_minilm") + [f"--model={MODEL}", *flags], TIMEOUT)


def peer(programs, *arguments):
    """What the same model in plain PyTorch prints, as JSON."""
    return json.loads(run_command(programs.peer("minilm.py") + [f"--model={MODEL}", f"--pieces={PIECES}", *map(str, arguments)], TIMEOUT))


def curve(programs, folder, *flags):
    log = folder / "log.jsonl"
    ours(programs, f"--pairs={PAIRS}", f"--log={log}", *TRAINING, *flags)
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def largest_difference(a, b):
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b))


def run(programs, quick=False):
    if not MODEL.exists():
        raise Failure(f"there is no {MODEL}; run `scripts/setup --minilm`")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for ranks, flags in cases(quick):
            ours(programs, f"--ranks={ranks}", f"--input={SENTENCES}", f"--output={folder}/embeddings", *flags)
            difference = peer(programs, "embed", SENTENCES, folder / "embeddings" / "model.safetensors")
            yield at_most("minilm", f"embeddings of 20 sentences, {name(ranks, flags)}: against PyTorch", difference, BOUND, "")
        unsharded = curve(programs, folder, "--strategy=none")
        for ranks, flags in cases(quick):
            difference = largest_difference(curve(programs, folder, f"--ranks={ranks}", *flags), unsharded)
            yield at_most("minilm", f"20 fine-tuning steps, {name(ranks, flags)}: against one process", difference, BOUND, "nats")
        difference = largest_difference(peer(programs, "train", PAIRS, *TRAINING), unsharded)
        yield at_most("minilm", "20 fine-tuning steps, one process: against PyTorch", difference, BOUND, "nats")
