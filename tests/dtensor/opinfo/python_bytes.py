"""Writes what Python's DTensor sends for calls of export_opinfo.py: python_bytes.py FOLDER, which has the exported calls.

Each case is a call with placements of its tensors, forward and backward, on rank 0 of 4 ranks: in a line, and 2x2. The placements of a
file's calls are the same in every run; in those of all calls (TESSERA_TEST_FULL=1) they are drawn with TESSERA_TEST_SEED (default 1).
The gradients of the results lie as these do, and those of the arguments come to lie as the arguments do. Nothing is sent: the process
group is a fake one. Calls that Python's DTensor refuses are left out.

python_bytes.json is a list of {file, call, mesh, placements, bytes, forward, collectives}: `call` counts those of the file that
have tensors, and `bytes` are those that the rank sends to others, `forward` before the backward (an all-reduce is a reduce-scatter
and an all-gather)."""

import json
import os
import pathlib
import random
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import export_opinfo

RANKS = 4
CALLS = 2  # of one operator in a file
PRODUCTS = {(4,): 3, (2, 2): 3}  # of placements, for each call


class Sent(TorchDispatchMode):
    """Counts what this rank sends to others while it is entered."""

    def __init__(self):
        super().__init__()
        self.bytes = self.forward = self.collectives = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func._schema.arguments[-1].name == "group_name":
            self.add(func._schema.name, args, result)
        return result

    def add(self, name, args, result):
        if isinstance(args[0], list):
            raise NotImplementedError(name)
        ranks = dist.get_world_size(dist.distributed_c10d._resolve_process_group(args[-1]))
        full = max(tensor.numel() * tensor.element_size() for tensor in (args[0], result))
        self.collectives += 1
        self.bytes += full * (ranks - 1) / ranks * (2 if "all_reduce" in name else 1)


def decode(value, kind):
    """What `export_opinfo.encode` wrote for an argument of the type `kind`."""
    if isinstance(value, tuple) and value[:1] == ("complex",):
        return complex(*value[1:])
    name = str(kind)
    if value is None or isinstance(value, torch.Tensor):
        return value
    if "ScalarType" in name:
        return export_opinfo.SCALAR_TYPES[value]
    if "MemoryFormat" in name:
        return export_opinfo.MEMORY_FORMATS[value]
    if "Layout" in name:
        return torch.strided
    if "Device" in name:
        return torch.device(value)
    return [decode(element, kind) for element in value] if isinstance(value, list) else value


def with_tensors(value, replace):
    if isinstance(value, torch.Tensor):
        return replace(value)
    return [with_tensors(element, replace) for element in value] if isinstance(value, list) else value


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for element in value for tensor in tensors_of(element)] if isinstance(value, (list, tuple)) else []


def operator_of(name):
    base, overload = name.removeprefix("aten::").rsplit(".", 1)
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def place(whole, mesh, placements):
    return distribute_tensor(whole.detach().clone(), mesh, placements, src_data_rank=None)


def leaf_of(tensor, mesh, placements):
    return place(tensor, mesh, placements).requires_grad_(tensor.requires_grad)


def backward(results, leaves):
    roots = [tensor for tensor in tensors_of(results) if tensor.requires_grad]
    if not roots or not leaves:
        return
    lying = [[Replicate() if placement.is_partial() else placement for placement in root.placements] for root in roots]
    cotangents = [place(torch.ones(root.shape, dtype=root.dtype), root.device_mesh, placements) for root, placements in zip(roots, lying)]
    gradients = torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
    for gradient, leaf in zip(gradients, leaves):
        if gradient is not None:
            gradient.redistribute(leaf.device_mesh, leaf.placements)


def sent_by(name, values, mesh, placements):
    op = operator_of(name)
    left, leaves, written = iter(placements), [], []

    def replace(tensor):
        leaf = leaf_of(tensor, mesh, next(left))
        if tensor.requires_grad:
            leaves.append(leaf)
        return leaf

    arguments = []
    for argument, value in zip(op._schema.arguments, values):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        value = with_tensors(decode(value, argument.real_type), replace)
        arguments.append(with_tensors(value, lambda leaf: leaf.clone() if leaf.requires_grad else leaf) if is_written else value)
    by_keyword = {argument.name: value for argument, value in zip(op._schema.arguments, arguments) if argument.kwarg_only}
    positional = [value for argument, value in zip(op._schema.arguments, arguments) if not argument.kwarg_only]
    torch.manual_seed(3)
    with Sent() as sent, torch.set_grad_enabled(bool(leaves)):
        results = op(*positional, **by_keyword)
        sent.forward = sent.bytes
        backward(results, leaves)
    return sent


def draw_placements(tensor, ndim, generator):
    return [generator.choice([Replicate(), *(Shard(dim) for dim in range(tensor.dim()))]) for _ in range(ndim)]


def text_of(placements):
    return "(" + ", ".join(f"Shard({placement.dim})" if placement.is_shard() else "Replicate()" for placement in placements) + ")"


def cases_of(file, calls, meshes, generator):
    taken = {}
    for index, (name, values) in enumerate(call for call in calls if tensors_of(call[1])):
        if taken.setdefault(name, 0) >= CALLS:
            continue
        taken[name] += 1
        for shape, mesh in meshes.items():
            for _ in range(PRODUCTS[shape]):
                placements = [draw_placements(tensor, len(shape), generator) for tensor in tensors_of(values)]
                try:
                    sent = sent_by(name, values, mesh, placements)
                except Exception:  # an operator that Python's DTensor refuses
                    continue
                texts = [text_of(of_tensor) for of_tensor in placements]
                yield {"file": file.stem, "call": index, "mesh": shape, "placements": texts,
                       "bytes": round(sent.bytes), "forward": round(sent.forward), "collectives": sent.collectives}


def main():
    folder = pathlib.Path(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    meshes = {shape: init_device_mesh("cpu", shape) for shape in PRODUCTS}
    seed = os.environ.get("TESSERA_TEST_SEED", "1") if os.environ.get("TESSERA_TEST_FULL") == "1" else "1"
    cases = []
    for file in sorted(folder.glob("*.pt")):
        generator = random.Random(f"{seed} {file.stem}")  # whichever other files there are
        cases += cases_of(file, torch.load(file, weights_only=False), meshes, generator)
    (folder / "python_bytes.json").write_text(json.dumps(cases, indent=0))
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
