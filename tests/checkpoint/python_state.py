"""The Python side of python_state_test: trains with FSDP2 on two ranks, and on a hybrid mesh of four, saves, and goes on.

python_state.py FOLDER: for each case FOLDER/<case>/saved (torch.distributed.checkpoint, model and optimizer after 3 steps),
FOLDER/<case>/later (the model after 3 more) and FOLDER/<case>/losses.txt (of those 3).
"""
import pathlib
import sys

import torch
import torch._dynamo  # which an optimizer loads at its first step: once here, in place of once in each fork
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.last = torch.nn.Linear(7, 3)
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))) + self.shift


class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Model()

    def forward(self, x):
        return self.net(x)


class Tied(torch.nn.Module):
    """Two layers of one weight, and a parameter of one element, of which three ranks of a mesh of four have nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 7), torch.nn.Linear(5, 7)
        self.last.weight = self.first.weight
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.tanh(self.first(x)) * self.last(x) * self.gain


# name: class, options, whether get_state_dict flattens, model, keys of model and optimizer
CASES = {
    "adamw": (torch.optim.AdamW, dict(betas=(0.8, 0.95), amsgrad=True), False, Model, "model", "optimizer"),
    "adamw-flat": (torch.optim.AdamW, dict(betas=(0.8, 0.95)), True, Model, "model", "optimizer"),
    "adamw-wrapped": (torch.optim.AdamW, dict(betas=(0.0, 0.95)), False, Wrapped, "weights", "training.opt"),
    "adamw-wrapped-flat": (torch.optim.AdamW, {}, True, Wrapped, "model", "optimizer"),
    "adam": (torch.optim.Adam, dict(eps=1e-6), False, Model, "model", "optimizer"),
    "sgd": (torch.optim.SGD, dict(momentum=0.9, nesterov=True), False, Model, "model", "optimizer"),
    "sgd-flat": (torch.optim.SGD, dict(momentum=0.9), True, Model, "model", "optimizer"),
    "sgd-without-state": (torch.optim.SGD, {}, False, Model, "model", "optimizer"),
    "rmsprop": (torch.optim.RMSprop, dict(momentum=0.5, centered=True), False, Model, "model", "optimizer"),
    "adagrad": (torch.optim.Adagrad, dict(lr_decay=0.01), False, Model, "model", "optimizer"),
}


def step_on(model, optimizer, scheduler, step, rank):
    """One step on this rank's rows; the mean loss over all ranks."""
    ranks = dist.get_world_size()
    x = torch.sin(torch.arange(12 * 5, dtype=torch.double) + step).view(12, 5).chunk(ranks)[rank].to(next(model.parameters()).dtype)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if scheduler:
        scheduler.step()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return (mean / ranks).item()


def train(rank, folder, mesh, case):
    kind, options, flatten, model_class, model_key, optimizer_key = CASES[case]
    torch.manual_seed(1)
    model = model_class().double()
    net = model.net if model_class is Wrapped else model
    torch.nn.init.constant_(net.shift, 0.25)
    fully_shard(net.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1, "lr": 0.02}, {"params": vectors, "weight_decay": 0.0, "lr": 0.01}]
    optimizer = kind(groups, **options)
    if case == "adamw-wrapped":  # an integer among the numbers
        for group in optimizer.param_groups:
            group["betas"] = (0, 0.95)
    # One that sets initial_lr, and keeps the rates.
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0) if case == "adamw" else None
    for step in range(3):
        step_on(model, optimizer, scheduler, step, rank)
    model_state, optimizer_state = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten)
    )
    nested = {model_key: model_state}
    at = nested
    *above, last = optimizer_key.split(".")
    for key in above:
        at = at.setdefault(key, {})
    at[last] = optimizer_state
    dcp.save(nested, checkpoint_id=f"{folder}/{case}/saved")
    losses = [step_on(model, optimizer, scheduler, step, rank) for step in range(3, 6)]
    dcp.save(dict(net.state_dict()), checkpoint_id=f"{folder}/{case}/later")
    if rank == 0:
        pathlib.Path(folder, case, "losses.txt").write_text("\n".join(repr(loss) for loss in losses))


def save_numbered(folder, mesh):
    """What optimizer.state_dict() returns as it is, and one that maximizes."""
    for name, options in (("numbered", {}), ("maximizing", {"maximize": True})):
        model = Model().double()
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        state = optimizer.state_dict()
        if name != "numbered":
            _, state = get_state_dict(model, optimizer)
        dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=f"{folder}/{name}")


def train_tied(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-of-four", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, dtype in (("tied", torch.double), ("tied-bf16", torch.bfloat16)):
        torch.manual_seed(1)
        model = Tied().to(dtype)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for step in range(3):
            step_on(model, optimizer, None, step, rank)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{name}/saved")
        losses = [step_on(model, optimizer, None, step, rank) for step in range(3, 6)]
        if rank == 0:
            pathlib.Path(folder, name, "losses.txt").write_text("\n".join(repr(loss) for loss in losses))
    dist.destroy_process_group()


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for case in CASES:
        train(rank, folder, mesh, case)
    save_numbered(folder, mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(run, (sys.argv[1],), RANKS, start_method="fork")
    torch.multiprocessing.start_processes(train_tied, (sys.argv[1],), 4, start_method="fork")
