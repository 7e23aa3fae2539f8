"""The model of measure_overhead.cpp under Python's FSDP2, driven by `benchmarks/compare` through standard input."""
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from serve import serve

GROUPS, WIDTH, BATCH = 25, 16, 4
REPETITIONS = 5


class Block(nn.Module):
    """Nine parameters: four layers with biases, and a scale."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return x + y * self.scale


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(GROUPS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def seconds_of_one(stack, x):
    stack.zero_grad()
    begin = time.perf_counter()
    stack(x).sum().backward()
    return time.perf_counter() - begin


def seconds_of_forward_and_backward(stack, x):
    """The median of a few, after one that warms the caches: another program ran in between."""
    seconds_of_one(stack, x)
    return statistics.median(seconds_of_one(stack, x) for _ in range(REPETITIONS))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    plain, sharded = Stack(), Stack()
    for block in sharded.blocks[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)  # its group is the last block's parameters
    x = torch.randn(BATCH, WIDTH)
    serve({"plain": lambda: seconds_of_forward_and_backward(plain, x),
           "sharded": lambda: seconds_of_forward_and_backward(sharded, x)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
