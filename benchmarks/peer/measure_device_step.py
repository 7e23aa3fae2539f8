"""The model of measure_device_step.cpp under Python's FSDP2, driven by `benchmarks/compare` through standard input.

Usage: measure_device_step.py LAYERS WIDTH SEQUENCE BATCH
"""
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from gpt import VOCABULARY, Gpt, cross_entropy
from serve import serve

WIDTH_OF_HEAD = 128


class DeviceStep:
    def __init__(self, layers, width, sequence, batch):
        with torch.device("cuda"):
            self.model = Gpt(layers, width, width // WIDTH_OF_HEAD, sequence)
            with torch.no_grad():  # the distribution of examples/gpt's weights
                for parameter in self.model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0, 0.02)
            windows = torch.randint(VOCABULARY, (batch, sequence + 1))
        options = {"mesh": init_device_mesh("cuda", (1,)),
                   "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
        for block in self.model.blocks:
            fsdp.fully_shard(block, **options)
        fsdp.fully_shard(self.model, **options)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()  # of the unsharded model
        self.inputs, self.targets = windows[:, :-1], windows[:, 1:]

    def run(self):
        """Seconds until the host has launched a forward and a backward, and until the device has done them."""
        begin = time.perf_counter()
        self.model.zero_grad()
        cross_entropy(self.model(self.inputs), self.targets).backward()
        launched = time.perf_counter() - begin
        torch.cuda.synchronize()
        return {"host": launched, "device": time.perf_counter() - begin}


def main():
    dist.init_process_group("nccl")
    step = DeviceStep(*map(int, sys.argv[1:5]))
    serve({"step": step.run, "peak": torch.cuda.max_memory_allocated})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
