"""Steps and clipping of 300 small parameters under Python's DTensor, driven by `benchmarks/compare` through standard input."""
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from serve import serve


def seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    parameters = [torch.nn.Parameter(distribute_tensor(torch.randn(32, 32), mesh, [Shard(0)])) for _ in range(300)]
    for parameter in parameters:
        parameter.grad = distribute_tensor(torch.full((32, 32), 1e-3), mesh, [Shard(0)])
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def small():
        calls = [optimizer.step, lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e-3)]
        times = [[seconds(call) for call in calls] for _ in range(21)][1:]
        return [statistics.median(each) for each in zip(*times)]

    serve({"small": small})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
