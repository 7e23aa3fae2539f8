"""The Python side of interop_test: checks what the library writes, and writes what it shall read.

interop.py check FOLDER TENSOR...               reads a checkpoint with safetensors and with torch.distributed.checkpoint
interop.py check-hugging-face FOLDER... TENSOR...   reads whole tensors, through the index where there is one
interop.py write FOLDER TENSOR...           writes FOLDER/dcp-safetensors/1, /2 and /4 on so many ranks with
                                            torch.distributed.checkpoint, and FOLDER/dcp/1, /2 and /4
interop.py write-hugging-face FOLDER TENSOR...  writes two safetensors files and their index
interop.py write-torch FOLDER                   writes files of torch.save with parameters, objects, views and compressed data

TENSOR is NAME:DTYPE:SIZE,SIZE,... and holds 0, 1, 2, … modulo 120 (modulo 2 for bool), row-major.
"""
import collections
import itertools
import json
import pathlib
import sys
import zipfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def expected(dtype, sizes):
    count = torch.Size(sizes).numel()
    return (torch.arange(count) % (2 if dtype == torch.bool else 120)).reshape(sizes).to(dtype)


def same(a, b):
    def raw(t):
        return t.contiguous().view(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and raw(a).equal(raw(b))


def check_parts(folder, tensors):
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


def read_on_rank(rank, ranks, folder, tensors):
    dist.init_process_group("gloo", init_method=f"file://{folder}.store-{ranks}", rank=rank, world_size=ranks)
    state = dict(distributed(tensors, init_device_mesh("cpu", (ranks,)), torch.zeros_like))
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    for name, tensor in state.items():
        assert same(tensor.full_tensor(), expected(*tensors[name])), f"{name} read by torch.distributed.checkpoint on {ranks} ranks"
    dist.destroy_process_group()


def check_hugging_face(folder, tensors):
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = json.loads(index.read_text())["weight_map"]
    else:
        files = dict.fromkeys(tensors, "model.safetensors")
    assert set(files) == set(tensors)
    for name, file_name in files.items():
        with safe_open(folder / file_name, framework="pt") as file:
            assert same(file.get_tensor(name), expected(*tensors[name])), name


def distributed(tensors, mesh, values=lambda tensor: tensor):
    """Each tensor as a DTensor, under one placement after another."""
    for position, (name, (dtype, sizes)) in enumerate(tensors.items()):
        placement = [Shard(0), Shard(len(sizes) - 1), Replicate()][position % 3] if sizes else Replicate()
        yield name, distribute_tensor(values(expected(dtype, sizes)), mesh, [placement], src_data_rank=None)


def write_on_rank(rank, kind, ranks, folder, tensors):
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=ranks)
    state = dict(distributed(tensors, init_device_mesh("cpu", (ranks,))))
    if kind == "dcp":
        state["step"] = 7
        state["nested"] = {"rate": 0.5, "names": ["a", "b"]}
        for dtype in (torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2):
            state[f"new.{dtype}".replace("torch.", "")] = expected(dtype, [5])
        writer = FileSystemWriter(folder)
    else:
        writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()


def write_hugging_face(folder, tensors):
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate([names[::2], names[1::2]], 1):
        file_name = f"model-{number:05}-of-00002.safetensors"
        save_file({name: expected(*tensors[name]) for name in part}, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_torch(folder):
    folder.mkdir(exist_ok=True)
    objects = {"deque": collections.deque([1, 2]), "defaultdict": collections.defaultdict(list, a=1, b=2)}
    torch.save({"w": torch.nn.Parameter(torch.arange(3.0)), **objects, "step": 7}, folder / "objects.pt")
    conjugate = torch.ones(3, dtype=torch.complex64).conj()
    torch.save({"w": conjugate}, folder / "conj.pt")
    torch.save({"w": conjugate.imag}, folder / "neg.pt")
    torch.save({"w": torch.zeros(3)}, folder / "plain.pt")
    with zipfile.ZipFile(folder / "plain.pt") as source, zipfile.ZipFile(folder / "zipped.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))


def parse(arguments):
    tensors = {}
    for argument in arguments:
        name, dtype, sizes = argument.split(":")
        tensors[name] = (getattr(torch, dtype), [int(n) for n in sizes.split(",") if n])
    return tensors


def start_ranks(function, arguments, ranks):
    import torch._dynamo  # noqa: F401  which DTensors load: once here, in place of once in each fork

    torch.multiprocessing.start_processes(function, arguments, ranks, start_method="fork")


def main():
    command, *arguments = sys.argv[1:]
    tensors = parse([word for word in arguments if ":" in word])
    folder, *more = (pathlib.Path(word) for word in arguments if ":" not in word)
    if command == "write":
        for kind, ranks in itertools.product(("dcp-safetensors", "dcp"), (1, 2, 4)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            start_ranks(write_on_rank, (kind, ranks, f"{folder}/{kind}/{ranks}", tensors), ranks)
    elif command == "check":
        check_parts(folder, tensors)
        check_with_dcp(folder, tensors)
        for ranks in (2, 4):
            start_ranks(read_on_rank, (ranks, folder, tensors), ranks)
    elif command == "check-hugging-face":
        for each in (folder, *more):
            check_hugging_face(each, tensors)
    elif command == "write-torch":
        write_torch(folder)
    else:
        write_hugging_face(folder, tensors)
    print(f"{len(tensors)} tensors: {command} done")


if __name__ == "__main__":
    main()
