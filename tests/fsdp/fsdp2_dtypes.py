"""The column of docs/mixed_precision.md that says which dtypes FSDP2 gives, measured with PyTorch's.

Usage: fsdp2_dtypes.py DOCUMENT   (the model and its policy are those of boundaries_test.cpp, which measures the other columns)
"""
import os
import pathlib
import sys
import tempfile

import torch
import torch._dynamo  # which an optimizer loads at its first step: once here, in place of once in each fork
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS = 2
# Every dtype of the policy is another one, so that a tensor's says where it comes from.
NAMES = {torch.bfloat16: "`param_dtype`", torch.float64: "`reduce_dtype`", torch.float16: "`output_dtype`", torch.float32: "own",
         torch.int64: "own"}
WITHOUT_CASTS = "with `cast_forward_inputs = false`: "


def policy(casts):
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64, output_dtype=torch.float16,
                                cast_forward_inputs=casts)


class Probe(torch.nn.Module):
    def __init__(self, casts):
        super().__init__()
        self.linear, self.below = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(4))
        self.casts, self.seen = casts, {}

    def note(self, point, tensor):
        self.seen[("" if self.casts else WITHOUT_CASTS) + point] = NAMES[tensor.dtype]

    def note_matrix_product(self, point):
        try:
            self.note(point, torch.ones(2, 4) @ self.linear.weight)
        except RuntimeError as error:
            assert "dtype" in str(error), error
            self.seen[("" if self.casts else WITHOUT_CASTS) + point] = "error"

    def forward(self, x, index):
        self.note("floating-point input, in forward", x)
        wide = torch.ones(4)
        if not self.casts:
            self.note("result of a product with a parameter, on a wider tensor", wide * self.scale)
            self.note_matrix_product("result of a matrix product with a parameter, on a wider tensor")
            return self.linear(x.to(torch.bfloat16)) * self.scale
        self.note("integer input, in forward", index)
        self.note("buffer", self.table)
        self.note("parameter that forward reads", self.scale)
        with torch.no_grad():
            self.note("result of an operator on parameters alone, without grad mode", torch.sigmoid(self.scale))
        self.scale.register_hook(lambda gradient: self.note("gradient of a parameter, as autograd makes it", gradient))
        self.note("result of an operator without a parameter, on an input", x * 2)
        y = self.linear(x)
        self.note("result of an operator with a parameter, on an input", y)
        self.note("result of a product with a parameter, on a wider tensor made in forward", wide * self.scale)
        self.note("result of a product with a parameter, on a wider buffer", self.table * self.scale)
        self.note_matrix_product("result of a matrix product with a parameter, on a wider tensor made in forward")
        self.note("result of a product with a parameter, on a tensor without dims", torch.tensor(2.0) * self.scale)
        below = self.below(y)
        self.note("output of a sharded module below that is called directly", below)
        return below * self.scale


def sharded_probe(casts):
    torch.manual_seed(0)
    probe, mesh = Probe(casts), init_device_mesh("cpu", (RANKS,))
    fully_shard(probe.below, mesh=mesh, mp_policy=policy(casts))
    return fully_shard(probe, mesh=mesh, mp_policy=policy(casts))


def measure():
    probe, index = sharded_probe(True), torch.arange(2)
    probe.set_all_reduce_hook(lambda reduced: probe.note("reduced gradient", reduced))
    x = torch.ones(2, 4, requires_grad=True)
    probe.set_requires_gradient_sync(False)
    probe(x, index).float().sum().backward()
    group = probe._get_fsdp_state()._fsdp_param_group
    accumulated = next(each for each in group.fsdp_params if each._param_fqn == "scale")
    probe.note("gradients added up without communication", accumulated.unsharded_accumulated_grad)
    probe.set_requires_gradient_sync(True)
    output = probe(x, index)
    probe.note("output", output)
    output.float().sum().backward()
    optimizer = torch.optim.AdamW(probe.parameters())
    optimizer.step()
    probe.note("parameter in `parameters()`, shard, state dict", probe.scale)
    probe.note("`grad()` of a parameter", probe.scale.grad)
    probe.note("`grad()` of an input", x.grad)
    probe.note("optimizer's state", optimizer.state[probe.scale]["exp_avg"])
    uncast = sharded_probe(False)
    uncast(torch.ones(2, 4), index)
    return probe.seen | uncast.seen


def documented(path):
    """{tensor: its dtype with FSDP2} of the rows where FSDP2 has such a tensor."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in path.read_text().splitlines() if line.startswith("| ")]
    return {cells[0]: cells[3] for cells in rows if len(cells) == 4 and cells[0] != "tensor" and cells[3] != "(none)"}


def run(rank, folder, document):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    measured, expected = measure(), documented(pathlib.Path(document))
    dist.destroy_process_group()
    wrong = [f"{point}: {expected.get(point, 'not documented')} in the document, but FSDP2 gives {measured.get(point, 'nothing')}"
             for point in sorted(expected.keys() | measured.keys()) if expected.get(point) != measured.get(point)]
    if wrong:
        sys.exit("\n".join(wrong))
    if rank == 0:
        print(f"{len(expected)} rows of the column FSDP2 are true")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder, sys.argv[1]), nprocs=RANKS, start_method="fork")
