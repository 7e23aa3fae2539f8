"""The model of measure_overhead.cpp under Python's FSDP2, driven by `benchmarks/compare` through standard input.

Usage: measure_overhead.py [RANKS [PARAMETERS [DEVICE]]]: of a job whose other ranks do not exist; of a group; cpu or cuda, whose host's
time alone counts.
"""
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from serve import serve

GROUPS, WIDTH, BATCH = 25, 16, 4
REPETITIONS = 5


class Block(nn.Module):
    """Four layers with biases, and scales: nine parameters or more."""

    def __init__(self, parameters):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(parameters - 8))

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        for scale in self.scales:
            y = y * scale
        return x + y


class Stack(nn.Module):
    def __init__(self, parameters):
        super().__init__()
        self.blocks = nn.ModuleList(Block(parameters) for _ in range(GROUPS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def seconds_of_one(stack, x):
    stack.zero_grad()
    if x.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    stack(x).sum().backward()
    return time.perf_counter() - begin


def seconds_of_forward_and_backward(stack, x):
    """The median of a few, after one that warms the caches: another program ran in between."""
    seconds_of_one(stack, x)
    return statistics.median(seconds_of_one(stack, x) for _ in range(REPETITIONS))


def main():
    ranks, parameters, device = int((sys.argv[1:] or [1])[0]), int((sys.argv[2:] or [9])[0]), (sys.argv[3:] or ["cpu"])[0]
    torch.set_num_threads(1)
    if ranks == 1:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    else:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh(device, (ranks,))
    plain, sharded = Stack(parameters).to(device), Stack(parameters).to(device)
    for block in sharded.blocks[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)  # its group is the last block's parameters
    x = torch.randn(BATCH, WIDTH, device=device)
    serve({"plain": lambda: seconds_of_forward_and_backward(plain, x),
           "sharded": lambda: seconds_of_forward_and_backward(sharded, x)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
