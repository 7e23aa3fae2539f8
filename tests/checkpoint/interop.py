"""Reads a checkpoint folder with the safetensors package and with torch.distributed.checkpoint, and compares every tensor.

interop.py FOLDER NAME:DTYPE:SIZE,SIZE,... ...

Every tensor holds 0, 1, 2, … modulo 120 (modulo 2 for bool), row-major.
"""
import json
import pathlib
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader


def expected(dtype, sizes):
    count = torch.Size(sizes).numel()
    return (torch.arange(count) % (2 if dtype == torch.bool else 120)).reshape(sizes).to(dtype)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


def check_with_safetensors(folder, tensors):
    seen = {name: torch.zeros(sizes, dtype=torch.int64) for name, (_, sizes) in tensors.items()}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            assert metadata["format"] == "pt" and metadata["DCP_VERSION"] == "1.0", metadata
            offsets = json.loads(metadata["DCP_SHARDING_INFO"])
            assert set(offsets) == set(file.keys())
            for name in file.keys():
                part = file.get_tensor(name)
                box = tuple(slice(o, o + n) for o, n in zip(offsets[name]["saved_offsets"], part.shape))
                assert same(part, expected(*tensors[name])[box]), f"{path.name}: {name}"
                seen[name][box] += 1
    for name, count in seen.items():
        assert bool((count == 1).all()), f"{name}: not every element is there once"


def check_with_dcp(folder, tensors):
    state = {name: torch.zeros(sizes, dtype=dtype) for name, (dtype, sizes) in tensors.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in state.items():
        assert same(tensor, expected(*tensors[name])), f"{name} read by torch.distributed.checkpoint"


def main():
    folder = pathlib.Path(sys.argv[1])
    tensors = {}
    for argument in sys.argv[2:]:
        name, dtype, sizes = argument.split(":")
        tensors[name] = (getattr(torch, dtype), [int(n) for n in sizes.split(",") if n])
    check_with_safetensors(folder, tensors)
    check_with_dcp(folder, tensors)
    print(f"{len(tensors)} tensors are the same")


main()
