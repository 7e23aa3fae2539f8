"""Takes the steps of tests/optim/python_test.cpp with PyTorch's optimizers, and compares the parameters.

Usage: optimizers.py FOLDER   (a file <optimizer>.pt for each, a tuple of the tensors before, the gradients, and the tensors after)
"""
import pathlib
import sys

import torch

BOUND = 1e-6  # relative to the largest element, where sums are taken in another order

ADAM = dict(lr=0.01, fused=True)
MUON = dict(lr=0.02, weight_decay=0.1)
MAKERS = {
    "FusedAdam": lambda p: torch.optim.Adam(p, weight_decay=0.1, **ADAM),
    "FusedAdam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, **ADAM),
    "FusedAdamW": lambda p: torch.optim.AdamW(p, weight_decay=0.1, **ADAM),
    "FusedAdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True, weight_decay=0.01, **ADAM),
    "FusedSGD": lambda p: torch.optim.SGD(p, fused=True, lr=0.1, weight_decay=0.1),
    "FusedSGD momentum": lambda p: torch.optim.SGD(p, fused=True, lr=0.05, momentum=0.9, dampening=0.1),
    "FusedSGD nesterov": lambda p: torch.optim.SGD(p, fused=True, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "FusedAdagrad": lambda p: torch.optim.Adagrad(p, fused=True, lr=0.05, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05, weight_decay=0.1),
    "Adafactor eps1": lambda p: torch.optim.Adafactor(p, lr=0.05, eps=(1e-4, 1e-3), d=1.5),
    "Muon": lambda p: torch.optim.Muon(p, **MUON),
    "Muon as AdamW": lambda p: torch.optim.Muon(p, adjust_lr_fn="match_rms_adamw", **MUON),
}


def steps(optimizer, parameters, gradients):
    for first in range(0, len(gradients), len(parameters)):
        for parameter, gradient in zip(parameters, gradients[first:]):
            parameter.grad = gradient
        optimizer.step()


def difference(file):
    before, all_gradients, after = torch.load(file, weights_only=True)
    # A parameter of no elements has no norm of its own to divide by.
    numbers = [i for i, tensor in enumerate(before) if tensor.numel() > 0]
    parameters = [before[i].requires_grad_() for i in numbers]
    gradients = [gradient for i, gradient in enumerate(all_gradients) if i % len(before) in numbers]
    steps(MAKERS[file.stem](parameters), parameters, gradients)
    pairs = [(parameter.detach(), after[i]) for parameter, i in zip(parameters, numbers)]
    return max(((ours - theirs).abs().max() / theirs.abs().max()).item() for theirs, ours in pairs)


def main():
    torch.set_num_threads(1)
    files = sorted(pathlib.Path(sys.argv[1]).glob("*.pt"))
    differences = {file.stem: difference(file) for file in files}
    for name, value in differences.items():
        print(f"{name}: {value:.1e}")
    far = [name for name, value in differences.items() if not value <= (0 if name.startswith(("Fused", "Muon")) else BOUND)]
    if far:
        sys.exit(f"not as PyTorch's: {', '.join(far)}")
    print(f"{len(files)} optimizers agree")


if __name__ == "__main__":
    main()
