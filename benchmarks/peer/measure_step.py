"""One rank of a training step under Python's FSDP2, driven by `benchmarks/compare` through standard input.

The model, its flags and the step are those of measure_step.cpp. The environment names the rank as under torchrun.
"""
import argparse
import importlib
import sys

import torch
import torch.distributed as dist

from gpt import VOCABULARY, Gpt, cross_entropy, make_optimizer
from serve import seconds_of, serve
from sharding import add_flags, shard


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "width", "heads", "sequence", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--backend", default="gloo", help="of torch.distributed")
    parser.add_argument("--package", help="the folder that has the backend's package tessera_backend")
    add_flags(parser)
    return parser.parse_args()


class TrainStep:
    def __init__(self, arguments):
        torch.manual_seed(1)
        self.model = Gpt(arguments.layers, arguments.width, arguments.heads, arguments.sequence)
        with torch.no_grad():  # the distribution of examples/gpt's weights: no denormals or overflows on one side only
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.02)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.model = shard(self.model, arguments, dist.get_world_size())
        self.optimizer = make_optimizer(self.model, 6e-3, 0.1)
        windows = torch.randint(VOCABULARY, (arguments.batch, arguments.sequence + 1))
        self.inputs, self.targets = windows[:, :-1], windows[:, 1:]

    def parts(self):
        """Runs a step, and stops after each of its parts to give its name."""
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(self.inputs), self.targets)
        yield "forward"
        loss.backward()
        yield "backward"
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        yield "clip"
        self.optimizer.step()
        yield "optimizer"

    def memory(self):
        tensors = [tensor for p in self.model.parameters() for tensor in (p, p.grad)]
        tensors += [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        storages = {t.to_local().untyped_storage().data_ptr(): t.to_local().untyped_storage().nbytes() for t in tensors}
        return {"state_bytes": sum(storages.values()), "parameters": self.parameters}


def main():
    arguments = parse_arguments()
    torch.set_num_threads(1)
    if arguments.package:
        sys.path.insert(0, arguments.package)
        importlib.import_module("tessera_backend")
    dist.init_process_group(arguments.backend)
    step = TrainStep(arguments)
    serve({"step": lambda: seconds_of(step.parts()), "memory": step.memory})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
