"""Takes the steps of tests/optim/python_test.cpp with bitsandbytes' AdamW in 8 bits, and compares the states bit by bit.

bitsandbytes' own kernels need a GPU; this takes its reference of them in PyTorch, which it ships beside them. Where a moment's
nearest code has not its sign, the kernels take the next one that does, which the reference leaves out.

Usage: bitsandbytes_steps.py FILE   (a tuple: the parameter before, the gradients, and {exp_avg, exp_avg_sq, their absmax, the parameter after})
"""
import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as it is written, not compiled

import torch

try:
    from bitsandbytes.backends.triton.kernels_optim import optimizer_update_8bit_blockwise_pytorch as update
    from bitsandbytes.functional import create_dynamic_map
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)

BLOCK = 256
LR, DECAY, BETA1, BETA2, EPS = 0.01, 0.1, 0.9, 0.999, 1e-8


def keep_signs(codes, absmax, moments, table):
    """What the kernels do with codes of the other sign."""
    values = table[codes.long()]
    lost = torch.signbit(values) != torch.signbit(moments)
    step = torch.where(moments > 0, 1, -1)
    return torch.where(lost, codes.int() + step, codes.int()).to(torch.uint8)


def main():
    torch.set_num_threads(1)
    before, gradients, after = torch.load(sys.argv[1], weights_only=True)
    parameter = before.clone()
    signed, unsigned = create_dynamic_map(signed=True), create_dynamic_map(signed=False)
    blocks = -(-parameter.numel() // BLOCK)
    codes = [torch.full(parameter.shape, code, dtype=torch.uint8) for code in (127, 0)]  # of 0
    absmax = [torch.zeros(blocks) for _ in range(2)]
    for step, gradient in enumerate(gradients, 1):
        which = torch.arange(parameter.numel()) // BLOCK
        moments = (signed[codes[0].long()] * absmax[0][which]).mul_(BETA1).add_(gradient, alpha=1 - BETA1)
        update(parameter, gradient.clone(), codes[0], codes[1], BETA1, BETA2, 0.0, 0.0, EPS, step, LR, signed, unsigned, absmax[0], absmax[1],
               DECAY, 1.0, False, optimizer_name="adam")
        codes[0] = keep_signs(codes[0], absmax[0], moments, signed)
    ours = dict(zip(("exp_avg", "exp_avg_sq", "exp_avg_absmax", "exp_avg_sq_absmax", "parameter"), after))
    theirs = dict(zip(ours, (*codes, *absmax, parameter)))
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_absmax", "exp_avg_sq_absmax"):
        different = (ours[name] != theirs[name]).sum().item()
        if different:
            sys.exit(f"{different} of {ours[name].numel()} elements of {name} differ")
    difference = (ours["parameter"] - theirs["parameter"]).abs().max().item()
    if not difference <= 1e-6:
        sys.exit(f"the parameters differ by {difference}")
    print("8-bit states agree with bitsandbytes")


if __name__ == "__main__":
    main()
