"""The GPT of gpt.py under Python's tensor parallelism, with sequence parallelism, a parallel loss and FSDP2 besides."""
import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel,
                                               parallelize_module)
from torch.nn import functional as F

from gpt import Gpt


def add_flags(parser):
    parser.add_argument("--mesh", default="", help="dp x tp, such as 2x2")
    parser.add_argument("--sequence-parallel", action="store_true")


def by_ranks(rows, ranks, blocks=3):
    """The rows of q, k and v as Python's Colwise wants them: those of each rank one after another. Its own inverse takes the numbers of
    blocks and ranks in the other order."""
    return rows.unflatten(0, (blocks, ranks, -1)).transpose(0, 1).flatten(0, 2)


class ParallelGpt(Gpt):
    """Its attention has the heads of a rank; the tied head is split by rows of the table."""

    def split(self, mesh, sequence_parallel):
        """`mesh`: the dim of tensor parallelism."""
        self.tensor_mesh, self.sequence_parallel, ranks = mesh, sequence_parallel, mesh.size()
        stream = Shard(1) if sequence_parallel else Replicate()
        for block in self.blocks:
            with torch.no_grad():
                for parameter in block.attention.qkv.parameters():
                    parameter.copy_(by_ranks(parameter, ranks))
            block.attention.heads //= ranks
            plan = {"attention.qkv": ColwiseParallel(input_layouts=stream), "attention.projection": RowwiseParallel(output_layouts=stream),
                    "expand": ColwiseParallel(input_layouts=stream), "contract": RowwiseParallel(output_layouts=stream)}
            if sequence_parallel:
                plan |= {"attention_norm": SequenceParallel(use_local_output=True), "mlp_norm": SequenceParallel(use_local_output=True)}
            parallelize_module(block, mesh, plan)
            block.attention.forward = lambda x, attention=block.attention: attend(attention, x)
        plan = {"token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)}
        if sequence_parallel:
            plan["norm"] = SequenceParallel(use_local_output=True)
        parallelize_module(self, mesh, plan)

    def forward(self, tokens):
        places = self.position_embedding(torch.arange(tokens.shape[1]))
        if self.sequence_parallel:
            whole = DTensor.from_local(places, self.tensor_mesh, [Replicate()], run_check=False)
            places = whole.redistribute(placements=[Shard(0)]).to_local()
        x = self.token_embedding(tokens) + places
        for block in self.blocks:
            x = block(x)
        layout = [Shard(1)] if self.sequence_parallel else [Replicate()]
        x = DTensor.from_local(self.norm(x), self.tensor_mesh, layout, run_check=False).redistribute(placements=[Replicate()])
        return F.linear(x, self.token_embedding.weight)

    def whole_state(self):
        """All parameters, as an unsharded model has them."""
        state = {}
        for name, parameter in self.named_parameters():
            value = parameter.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if ".qkv." in name:
                value = by_ranks(value, 3, blocks=self.tensor_mesh.size())
            state[name] = value.contiguous().clone()
        return state


def attend(attention, x):
    """The forward of gpt.py's Attention, of a rank's heads."""
    parts = attention.qkv(x)
    batch, time, features = parts.shape
    parts = parts.view(batch, time, 3, attention.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
    return attention.projection(mixed.transpose(1, 2).reshape(batch, time, features // 3))


def loss_of(model, inputs, targets):
    """Its backward must be in `loss_parallel` as well."""
    logits = model(inputs)
    targets = DTensor.from_local(targets, model.tensor_mesh, [Replicate()], run_check=False)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def clip(model, largest):
    """clip_grad_norm_, which refuses gradients of several meshes at once."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [(g.full_tensor() if isinstance(g, DTensor) else g).norm() for g in gradients]
    factor = (largest / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)


def make_parallel(model, arguments, world):
    """Splits the model over the last dim of the mesh, and shards it over the first. Returns this rank's number among those that have rows
    of their own, and how many these are."""
    shape = tuple(int(size) for size in arguments.mesh.split("x")) if arguments.mesh else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model.split(mesh["tp"], arguments.sequence_parallel)
    if shape[0] > 1:
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh["dp"])
        fsdp.fully_shard(model, mesh=mesh["dp"])
    return mesh["dp"].get_local_rank(), shape[0]


def optimizer_of(model, learning_rate, weight_decay):
    """As make_optimizer of gpt.py, with a group for each kind of parameter: foreach takes those of one mesh."""
    groups = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.dim() > 1, mesh), []).append(parameter)
    return torch.optim.AdamW([{"params": group, "weight_decay": weight_decay if is_matrix else 0.0}
                              for (is_matrix, _), group in groups.items()], lr=learning_rate, betas=(0.9, 0.95))


__all__ = ["ParallelGpt", "add_flags", "clip", "loss_of", "loss_parallel", "make_parallel", "optimizer_of"]
