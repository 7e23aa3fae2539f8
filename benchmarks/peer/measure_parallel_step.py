"""One rank of a training step under Python's tensor parallelism, driven by `benchmarks/compare` through standard input.

The model, its flags and the step are those of measure_step.cpp. The environment names the rank as under torchrun.
"""
import torch
import torch.distributed as dist

from parallel import ParallelGpt, add_flags, clip, loss_of, loss_parallel, make_parallel, optimizer_of
from training_step import draw_rows, parser_of, serve_step


def parse_arguments():
    parser = parser_of(__doc__)
    add_flags(parser)
    return parser.parse_args()


class TrainStep:
    def __init__(self, arguments):
        torch.manual_seed(1)
        self.model = ParallelGpt(arguments.layers, arguments.width, arguments.heads, arguments.sequence)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.02)
        make_parallel(self.model, arguments, dist.get_world_size())
        self.optimizer = optimizer_of(self.model, 6e-3, 0.1)
        self.inputs, self.targets = draw_rows(arguments.batch, arguments.sequence)

    def parts(self):
        """Runs a step, and stops after each of its parts to give its name."""
        self.optimizer.zero_grad()
        with loss_parallel():
            loss = loss_of(self.model, self.inputs, self.targets)
            yield "forward"
            loss.backward()
        yield "backward"
        clip(self.model, 1.0)
        yield "clip"
        self.optimizer.step()
        yield "optimizer"


if __name__ == "__main__":
    flags = parse_arguments()
    serve_step(lambda: TrainStep(flags))
