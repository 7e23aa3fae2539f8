"""The calls of measure_dispatch.cpp under Python's DTensor, driven by `benchmarks/compare` through standard input."""
import itertools
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from serve import serve

SIZES = itertools.count(17)


def microseconds(call, count):
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return 1e6 * (time.perf_counter() - begin) / count


def warm(call, count):
    """The median of a few, after one that warms the caches."""
    microseconds(call, count // 4 + 1)
    return statistics.median(microseconds(call, count) for _ in range(5))


def mesh_of(dims):
    return init_device_mesh("cpu", (1,) * dims)


def first(dims, call, repetitions):
    """First calls: shapes that no call had before."""
    mesh, plain, sharded = mesh_of(dims), [], []
    for _ in range(repetitions):
        n = next(SIZES)
        whole = [torch.randn(n, n), torch.randn(n, n)]
        parts = [distribute_tensor(whole[0], mesh, [Shard(0)] * dims), distribute_tensor(whole[1], mesh, [Replicate()] * dims)]
        plain.append(microseconds(lambda: call(whole), 1))
        sharded.append(microseconds(lambda: call(parts), 1))
    return statistics.median(plain), statistics.median(sharded)


def adamw(mesh, **kind):
    def put(whole):
        return distribute_tensor(whole, mesh, [Shard(0)]) if mesh else whole

    parameters = [torch.nn.Parameter(put(torch.randn(32, 32))) for _ in range(300)]
    for parameter in parameters:
        parameter.grad = put(torch.randn(32, 32))
    return torch.optim.AdamW(parameters, **kind)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh, grid = mesh_of(1), mesh_of(2)
    plain = [torch.randn(8, 8) for _ in range(20)]
    sharded = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in plain]
    on_grid = distribute_tensor(plain[0], grid, [Shard(0), Shard(1)])

    def warm_call(count, call):
        return lambda: [warm(lambda: call(plain), count), warm(lambda: call(sharded), count)]

    def first_call(dims, call):
        return lambda: first(dims, call, 9 if dims < 3 else 3 if dims == 3 else 1)

    def step(**kind):
        optimizers = adamw(None, **kind), adamw(mesh, **kind)
        return lambda: [warm(optimizer.step, 1) for optimizer in optimizers]

    commands = {
        "add": warm_call(1000, lambda t: t[0].add(t[1])),
        "detach": warm_call(1000, lambda t: t[0].detach()),
        "mm": warm_call(1000, lambda t: t[0].mm(t[1])),
        "mul_": warm_call(1000, lambda t: t[0].mul_(t[1])),
        "view": warm_call(1000, lambda t: t[0].view(4, 2, 8)),
        "cat": warm_call(100, lambda t: torch.cat(t)),
        "foreach_add": warm_call(100, lambda t: torch._foreach_add_(t, 1.0)),
        "redistribute": lambda: [0.0, warm(lambda: on_grid.redistribute(grid, [Replicate(), Replicate()]), 100)],
        "first add": first_call(1, lambda t: t[0].add(t[1])),
        "adamw fused": step(fused=True),
        "adamw foreach": step(foreach=True),
    }
    for dims in range(1, 5):
        commands[f"first mm {dims}"] = first_call(dims, lambda t: t[0].mm(t[1]))
    serve(commands)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
