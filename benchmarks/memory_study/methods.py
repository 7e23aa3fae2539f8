"""What is compared: a method is a name and settings of tessera-bench."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Method:
    name: str
    settings: dict
    note: str = ""


METHODS = [
    Method("no sharding", {"strategy": "no-shard"}, "every rank has everything, as under DDP"),
    Method("no sharding, recompute", {"strategy": "no-shard", "recompute": True}),
    Method("ZeRO-1", {"strategy": "zero-1"}, "the optimizer's state is split"),
    Method("ZeRO-2", {"strategy": "zero-2"}, "the gradients too"),
    Method("ZeRO-3", {"strategy": "full"}, "the parameters too, as under FSDP2's `fully_shard`"),
    Method("ZeRO-3, recompute", {"strategy": "full", "recompute": True}),
    Method("ZeRO-3, offload to the host", {"strategy": "full", "offload": "host"}),
    Method("ZeRO-3, offload to files", {"strategy": "full", "offload": "files"}),
    Method("ZeRO-3, files, recompute", {"strategy": "full", "offload": "files", "recompute": True}),
]


@dataclasses.dataclass(frozen=True)
class Study:
    """A model, the memory that a rank may have for it, and the rows a rank up to which batches are tried."""
    name: str
    title: str
    layers: int
    width: int
    sequence: int
    limit_mb: int
    most_rows: int
