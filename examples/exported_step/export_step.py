"""Compiles a training step, loss and gradients, with AOTInductor for train_exported_step.

Usage: export_step.py FOLDER
"""
import argparse
import pathlib

import torch
from torch import nn
from torch.export.experimental import _export_forward_backward

INPUTS, WIDTH, CLASSES, ROWS, BATCHES = 6, 24, 5, 4, 10  # ROWS: of a rank in a step; the compiled shapes are fixed


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(INPUTS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


class Step(nn.Module):
    """What is compiled: the loss is its only output, as the export of a backward wants it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.model(x), y)


def batches():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * 12, INPUTS, generator=generator)
    return x, (x.sum(1).abs() * 2).long() % CLASSES


def compile_step(folder):
    torch.manual_seed(0)
    step = Step(Model())
    x, y = batches()
    joint = _export_forward_backward(torch.export.export(step, (x[:ROWS], y[:ROWS])))
    gradients = [output.target for output in joint.graph_signature.output_specs[1:]]
    torch._inductor.aoti_compile_and_package(joint, package_path=str(folder / "step.pt2"), inductor_configs={
        "aot_inductor.package_constants_in_so": False,  # the program brings the parameters
        "always_keep_tensor_constants": True,
        "aot_inductor.metadata": {"gradients": ",".join(gradients)},
        "aot_inductor.precompile_headers": False,  # one package does not repay it
    })
    torch.save({"x": x, "y": y, **{name: parameter.detach() for name, parameter in step.named_parameters()}}, folder / "start.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    compile_step(arguments.folder)
