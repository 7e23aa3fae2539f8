"""Trains a small model with Python's FSDP2 once for each case of a JSON file: python_parity.py RANKS STORE CASES.

Prints one JSON object a case: the mean loss over the ranks of each step, whether each step was taken, and the modules that are
unsharded after a forward without a backward. The model, the batches and the cases' fields are those of python_parity_test.cpp."""
import contextlib
import json
import os
import sys

import torch
import torch._dynamo  # which an optimizer loads at its first step: once here, in place of once in each fork
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Shard

STEPS, ROWS, FEATURES, WIDTH, BLOCKS = 20, 8, 8, 16, 3
DTYPES = {"": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(WIDTH))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) * self.scale


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = torch.nn.Linear(WIDTH, FEATURES)
        with torch.no_grad():
            for number, (name, parameter) in enumerate(sorted(self.named_parameters())):
                wave = torch.sin(torch.arange(parameter.numel()) * 0.7 + number).view_as(parameter)
                parameter.copy_(1 + 0.1 * wave if "norm.weight" in name or "scale" in name else 0.3 * wave)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(case, step, micro, rank, ranks):
    rows = torch.sin(torch.arange(ROWS * FEATURES) * 0.3 + step * 1.7 + micro * 0.9).view(ROWS, FEATURES)
    if case["scales"] and step in (5, 11):
        rows[0] *= 3000  # overflows on rank 0 alone
    return rows.chunk(ranks)[rank]


def placement_fn(case):
    if case["shard_dim"] == "":
        return None
    if case["shard_dim"] == "largest":
        return lambda parameter: Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))
    return lambda parameter: Shard(int(case["shard_dim"])) if parameter.ndim == 2 else None


def shard(model, case, ranks):
    names = ("replicate", "shard") if len(case["mesh"]) == 2 else ("shard",)
    options = {"mesh": init_device_mesh("cpu", tuple(case["mesh"]), mesh_dim_names=names)}
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=DTYPES[case["param_dtype"]], reduce_dtype=DTYPES[case["reduce_dtype"]],
                                                cast_forward_inputs=case["cast_forward_inputs"])
    if case["ignored"]:
        options["ignored_params"] = {parameter for name, parameter in model.named_parameters() if case["ignored"] in name}
    if case["offloads"]:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if not case["replicates"]:
        options["reshard_after_forward"] = case["reshard_after_forward"]
        options["shard_placement_fn"] = placement_fn(case)
    wrap = replicate if case["replicates"] else fully_shard
    for block in model.blocks:
        wrap(block, **options)
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=DTYPES[case["param_dtype"]], reduce_dtype=DTYPES[case["reduce_dtype"]],
                                                output_dtype=DTYPES[case["output_dtype"]], cast_forward_inputs=case["cast_forward_inputs"])
    wrap(model, **options)
    for name in case["setters"]:
        apply_setter(model, name)


def apply_setter(model, name):
    blocks = list(model.blocks)
    if name == "forward prefetch":
        blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
    elif name == "backward prefetch":
        blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    elif name == "divide factor":
        for module in (*blocks, model):
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    elif name == "no reshard after forward":
        model.set_reshard_after_forward(False)
    else:
        assert name == "reshard the root after forward", name
        model.set_reshard_after_forward(True, recurse=False)


def loss_of(model, case, step, micro, rank, ranks):
    x = batch(case, step, micro, rank, ranks)
    y = model(x if case["cast_forward_inputs"] else x.to(DTYPES[case["param_dtype"]]))
    assert case["output_dtype"] == "" or y.dtype == DTYPES[case["output_dtype"]]
    return (y.float() - torch.tanh(2 * x.clamp(-1, 1))).square().mean()


def accumulate(model, case, scale, step, rank, ranks):
    total = 0.0
    for micro in range(case["micro_batches"]):
        is_last = micro == case["micro_batches"] - 1
        model.set_is_last_backward(is_last)
        if case["accumulates"] == "without sync":
            model.set_requires_gradient_sync(is_last)
        elif case["accumulates"] == "without all-reduce":
            model.set_requires_all_reduce(is_last)
        elif case["accumulates"] == "without reshard":
            model.set_reshard_after_backward(is_last)
        loss = loss_of(model, case, step, micro, rank, ranks) / case["micro_batches"]
        scale(loss).backward()
        total += loss.item()
    return total


def train(case, rank, ranks):
    model = Net()
    shard(model, case, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-3)
    scaler = ShardedGradScaler(device="cpu", init_scale=65536.0 * 16, growth_interval=3, enabled=case["scales"])
    losses, stepped, scales = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(accumulate(model, case, scaler.scale, step, rank, ranks))
        if case["max_norm"] > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["max_norm"], float(case["norm_type"]))
        weight = optimizer.param_groups[0]["params"][-1].to_local()
        before = weight.clone()
        scaler.step(optimizer)
        scaler.update()
        stepped.append(float(not torch.equal(before, weight)))
        scales.append(scaler.get_scale())
    sums, any_stepped = torch.tensor(losses, dtype=torch.float64), torch.tensor(stepped)
    dist.all_reduce(sums)
    dist.all_reduce(any_stepped, dist.ReduceOp.MAX)
    return {"losses": (sums / ranks).tolist(), "stepped": any_stepped.bool().tolist(), "scales": scales, "open": evaluate(model, case, rank, ranks)}


def evaluate(model, case, rank, ranks):
    """The modules that are open after a forward without a backward."""
    if case["replicates"]:
        return []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with torch.no_grad():
        loss_of(model, case, STEPS, 0, rank, ranks)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group.is_unsharded:
            found.append(name)
    return sorted(found)


def run(rank, ranks, store, cases):
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null) if rank else contextlib.nullcontext():
        dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(store, ranks))
        torch.set_num_threads(1)
        for case in cases:
            result = train(case, rank, ranks)
            if rank == 0:
                print(json.dumps(result), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(sys.argv[3]) as file:
        mp.start_processes(run, args=(int(sys.argv[1]), sys.argv[2], json.load(file)), nprocs=int(sys.argv[1]), start_method="fork")
