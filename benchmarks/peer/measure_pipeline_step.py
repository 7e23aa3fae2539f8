"""One rank of a training step under Python's torch.distributed.pipelining, driven by `benchmarks/compare` through standard input.

The model, its cut into stages, the flags and the step are those of measure_pipeline_step.cpp. The environment names the rank as under
torchrun.
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from gpt import VOCABULARY, Block, cross_entropy
from training_step import draw_rows, parser_of, serve_step

SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
             "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B, "looped-bfs": pipelining.ScheduleLoopedBFS,
             "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble}
OF_ONE_STAGE = ("gpipe", "1f1b")  # a rank; the others have two


def parse_arguments():
    parser = parser_of(__doc__, "micro-batches")
    parser.add_argument("--schedule", choices=SCHEDULES, required=True)
    return parser.parse_args()


class Stage(nn.Module):
    """The blocks of a stage, with the embedding before the first one and the head after the last."""

    def __init__(self, arguments, index, count):
        super().__init__()
        first, last = (stage * arguments.layers // count for stage in (index, index + 1))
        self.blocks = nn.ModuleList(Block(arguments.width, arguments.heads) for _ in range(first, last))
        self.tokens = nn.Embedding(VOCABULARY, arguments.width) if index == 0 else None
        self.places = nn.Embedding(arguments.sequence, arguments.width) if index == 0 else None
        self.norm = nn.LayerNorm(arguments.width) if index == count - 1 else None
        self.head = nn.Linear(arguments.width, VOCABULARY, bias=False) if index == count - 1 else None

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


class TrainStep:
    def __init__(self, arguments):
        torch.manual_seed(1)
        rank, world = dist.get_rank(), dist.get_world_size()
        chunks = 1 if arguments.schedule in OF_ONE_STAGE else 2
        count = chunks * world
        modules = [Stage(arguments, rank + chunk * world, count) for chunk in range(chunks)]
        stages = [PipelineStage(module, rank + chunk * world, count, torch.device("cpu")) for chunk, module in enumerate(modules)]
        self.schedule = SCHEDULES[arguments.schedule](stages if chunks > 1 else stages[0], arguments.micro_batches, loss_fn=cross_entropy)
        self.optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()])
        inputs, targets = draw_rows(arguments.batch * arguments.micro_batches, arguments.sequence)
        self.inputs = (inputs,) if rank == 0 else ()
        self.target = {"target": targets, "losses": []} if rank == world - 1 else {}

    def parts(self):
        """Runs a step, and stops after each of its parts to give its name."""
        self.optimizer.zero_grad()
        self.schedule.step(*self.inputs, **self.target)
        yield "schedule"
        self.optimizer.step()
        yield "optimizer"


if __name__ == "__main__":
    flags = parse_arguments()
    serve_step(lambda: TrainStep(flags))
