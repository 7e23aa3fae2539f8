"""A training in fp16 with Python's FSDP2 and its gradient scaler on 2 ranks: prints one JSON list a step: the loss, the scale after it,
and whether the optimizer stepped. The weights and the batches are formulas, the same as in grad_scaler_test.cpp."""
import json
import os
import sys

import torch
import torch._dynamo  # which an optimizer loads at its first step: once here, in place of once in each fork
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

STEPS, ROWS, WIDTH = 12, 8, 6


def make_model():
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Tanh(), torch.nn.Linear(2 * WIDTH, WIDTH))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.3 * torch.sin(torch.arange(parameter.numel()) * 0.7 + number).view_as(parameter))
    return model


def batch(step, rank, ranks):
    rows = torch.sin(torch.arange(ROWS * WIDTH) * 0.3 + step).view(ROWS, WIDTH)
    if step in (3, 7):
        rows[0] *= 3000  # overflows on rank 0 alone
    return rows.chunk(ranks)[rank]


def train(rank, ranks, store):
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(store, ranks))
    torch.set_num_threads(1)
    model = make_model()
    mesh = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=65536.0 * 16, growth_interval=3)
    for step in range(STEPS):
        x = batch(step, rank, ranks)
        optimizer.zero_grad()
        y = model(x)
        loss = (y.float() - x.clamp(-1, 1)).square().mean()
        scaler.scale(loss).backward()
        before = model[0].weight.to_local().clone()
        scaler.step(optimizer)
        scaler.update()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        stepped = torch.tensor(float(not torch.equal(before, model[0].weight.to_local())))
        dist.all_reduce(stepped, dist.ReduceOp.MAX)
        if rank == 0:
            print(json.dumps([mean.item() / ranks, scaler.get_scale(), bool(stepped)]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.start_processes(train, args=(ranks, sys.argv[2]), nprocs=ranks, start_method="fork")
