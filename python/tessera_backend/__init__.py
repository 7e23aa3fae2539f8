"""Tessera's collectives for PyTorch: `import tessera_backend` registers the torch.distributed backend "tessera" for CPU tensors.

    import torch.distributed as dist
    import tessera_backend

    dist.init_process_group("tessera")  # or "cpu:tessera,cuda:nccl"

Data goes through shared memory inside a host, and through gloo between hosts. See docs/python.md.
"""
import torch.distributed as _dist

from tessera_backend._extension import make_backend as _make_backend

_dist.Backend.register_backend("tessera", _make_backend, extended_api=True, devices=["cpu"])
