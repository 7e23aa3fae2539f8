"""DDP, FSDP2, DTensor and distributed checkpoints of PyTorch on our backend, beside the same on gloo."""
import tempfile
import unittest

import torch
import torch._dynamo  # which an optimizer loads at its first step: once here, in place of once in each fork
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ranks

STEPS = 3


def make_model(sparse=False):
    torch.manual_seed(3)
    embedding, head = nn.Embedding(11, 13, sparse=sparse), nn.Linear(17, 5, bias=False)
    return nn.Sequential(embedding, nn.Linear(13, 17), nn.LayerNorm(17), nn.GELU(), head)


def batch(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, 11, (4, 6), generator=generator)


def train(model, clip=True, optimizer=torch.optim.AdamW):
    """The losses of some steps, and the weights after them."""
    optimizer = optimizer(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step)).float().square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    weights = [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return losses + weights


def ddp(group, **options):
    return train(nn.parallel.DistributedDataParallel(make_model(), process_group=group, **options))


def ddp_with_small_buckets(group):
    return ddp(group, bucket_cap_mb=0.001, find_unused_parameters=True, gradient_as_bucket_view=True)


def ddp_with_a_hook(group):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    model = nn.parallel.DistributedDataParallel(make_model(), process_group=group)
    model.register_comm_hook(group, default_hooks.bf16_compress_hook)
    return train(model)


def ddp_with_a_hook_that_waits(group):
    """Its futures' callbacks make further calls, and wait for them."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    model = nn.parallel.DistributedDataParallel(make_model(), process_group=group)
    model.register_comm_hook(powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    return train(model, optimizer=torch.optim.SGD)


def ddp_of_sparse_gradients(group):
    model = nn.parallel.DistributedDataParallel(make_model(sparse=True), process_group=group)
    return train(model, clip=False, optimizer=torch.optim.SGD)


def fsdp2(group, allocate=False, **options):
    mesh = DeviceMesh.from_group(group, "cpu")
    model = make_model()
    for module in (model[1], model[4], model):
        fully_shard(module, mesh=mesh, **options)
        if allocate:
            module.set_allocate_memory_from_process_group_for_comm(True)
    return train(model)


def fsdp2_in_shared_buffers(group):
    return fsdp2(group, allocate=dist.get_backend(group) == "tessera")


def fsdp2_in_bf16(group):
    return fsdp2(group, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), reshard_after_forward=False)


def hybrid(group):
    """Sharded in pairs, replicated across them."""
    if group.size() < 4:
        return []
    backend = dist.get_backend(group)
    pairs = [dist.new_group(pair, backend=backend) for pair in ([0, 1], [2, 3])]
    across = [dist.new_group(pair, backend=backend) for pair in ([0, 2], [1, 3])]
    mesh = DeviceMesh.from_group([across[dist.get_rank() % 2], pairs[dist.get_rank() // 2]], "cpu", mesh=[[0, 1], [2, 3]],
                                 mesh_dim_names=("replicate", "shard"))
    model = make_model()
    for module in (model[1], model):
        fully_shard(module, mesh=mesh)
    return train(model)


def redistribution(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    found = []
    for shape in ((5, 7), (1, 3), (8, 0)):
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
        for source in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(whole, mesh, [source])
            for target in (Shard(0), Shard(1), Replicate()):
                moved = tensor.redistribute(placements=[target])
                assert torch.equal(moved.full_tensor(), whole)
                found.append(moved.to_local())
        for operation in ("sum", "avg") if dist.get_backend(group) == "tessera" else ("sum",):
            partial = DTensor.from_local(whole, mesh, [Partial(operation)])
            factor = group.size() if operation == "sum" else 1
            for target in (Shard(0), Shard(1), Replicate()):
                assert torch.equal(partial.redistribute(placements=[target]).full_tensor(), factor * whole)
    return found


RUNS = (ddp, ddp_with_small_buckets, ddp_with_a_hook, ddp_with_a_hook_that_waits, ddp_of_sparse_gradients, fsdp2,
        fsdp2_in_shared_buffers, fsdp2_in_bf16, hybrid, redistribution)


def differences():
    """Of every run, what is not nearly the same on gloo; gloo adds in another order."""
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    different = []
    for run in RUNS:
        found, expected = run(ours), run(gloo)
        tolerance = 1e-2 if "bf16" in run.__name__ or "hook" in run.__name__ else 1e-5
        same = [a.shape == b.shape and torch.allclose(a, b, tolerance, tolerance) for a, b in zip(found, expected, strict=True)]
        if not all(same):
            different.append(run.__name__)
    return different


def saved_and_loaded(folder):
    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    train(model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    other = make_model()
    fully_shard(other, mesh=mesh)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    return all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(model.parameters(), other.parameters()))


class Training(unittest.TestCase):
    def test_as_on_gloo(self):
        for size in (1, 2, 3, 4):
            with self.subTest(ranks=size):
                self.assertEqual(ranks.run(size, differences), size * [[]])

    def test_checkpoints(self):
        for size in (2, 4):
            with self.subTest(ranks=size), tempfile.TemporaryDirectory() as folder:
                self.assertEqual(ranks.run(size, saved_and_loaded, folder), size * [True])


if __name__ == "__main__":
    unittest.main()
