"""Python's FSDP2 with the names that train_gpt's flags have."""
import torch
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_flags(parser):
    parser.add_argument("--strategy", choices=("full", "hybrid", "no-shard", "ddp", "none"), default="full")
    parser.add_argument("--mesh", default="", help="2x2, for hybrid")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--reduce-precision", choices=DTYPES, default="fp32")
    parser.add_argument("--shared-buffers", action="store_true", help="FSDP2's buffers in the memory of the backend")


def shard(model, arguments, world):
    """The model with every block a group, and the rest the root's; or DDP's wrapper around it; or as it is."""
    if arguments.strategy == "none":
        return model
    if arguments.strategy == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    hybrid = arguments.strategy == "hybrid"
    shape = tuple(int(size) for size in arguments.mesh.split("x")) if arguments.mesh else (world,)
    names = ("replicate", "shard") if hybrid else ("replicate",) if arguments.strategy == "no-shard" else ("shard",)
    options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if arguments.precision != "fp32":
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(
            param_dtype=DTYPES[arguments.precision], reduce_dtype=DTYPES[arguments.reduce_precision])
    wrap = replicate if arguments.strategy == "no-shard" else fsdp.fully_shard
    for block in model.blocks:
        wrap(block, **options)
    wrap(model, **options)
    if arguments.shared_buffers:
        for module in (*model.blocks, model):
            module.set_allocate_memory_from_process_group_for_comm(True)
    return model
