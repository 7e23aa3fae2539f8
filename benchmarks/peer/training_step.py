"""What the programs have alike that run one rank of a training step."""
import argparse

import torch
import torch.distributed as dist

from gpt import VOCABULARY
from serve import seconds_of, serve


def parser_of(description, *others):
    """The flags of the model of gpt.py and of its rows, and `others`, which are numbers too."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("layers", "width", "heads", "sequence", "batch", *others):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


def draw_rows(count, sequence):
    """Inputs, and the targets, which are the byte after each."""
    windows = torch.randint(VOCABULARY, (count, sequence + 1))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def serve_step(make):
    """Joins the job on gloo, with one thread a rank, and answers what `benchmarks/compare` asks. `make()` is a step with a generator
    `parts`, which stops after each part to give its name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = make()
    serve({"step": lambda: seconds_of(step.parts())})
    dist.destroy_process_group()
