"""One rank of Python's tensor parallelism training what `train_gpt --dump-initial` wrote.

The environment names the rank as under torchrun. Rank 0 prints the losses, means over the data-parallel ranks, as one line of JSON, and
writes the weights after the last step.
"""
import argparse
import json
import pathlib

import safetensors.torch
import torch
import torch.distributed as dist

from parallel import ParallelGpt, add_flags, clip, loss_of, loss_parallel, make_parallel, optimizer_of
from train import make_model, read_initial


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial", type=pathlib.Path, required=True, help="the folder that train_gpt wrote")
    parser.add_argument("--weights", type=pathlib.Path, required=True, help="file for the weights after the last step")
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--clip", type=float, required=True)
    parser.add_argument("--weight-decay", type=float, required=True)
    add_flags(parser)
    return parser.parse_args()


def train_step(model, optimizer, inputs, targets, largest_norm):
    optimizer.zero_grad()
    with loss_parallel():
        loss = loss_of(model, inputs, targets)
        loss.backward()
    clip(model, largest_norm)
    optimizer.step()
    mean = loss.detach().full_tensor().double()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main():
    arguments = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensors = read_initial(arguments.initial)
    inputs, targets, rates = (tensors.pop(name) for name in ("inputs", "targets", "learning_rates"))
    model = make_model(tensors, arguments.heads, ParallelGpt)
    mine, count = make_parallel(model, arguments, dist.get_world_size())
    optimizer = optimizer_of(model, rates[0].item(), arguments.weight_decay)
    losses = []
    for step, rate in enumerate(rates.tolist()):
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = [batch[step].chunk(count)[mine] for batch in (inputs, targets)]
        losses.append(train_step(model, optimizer, *rows, arguments.clip))
    state = model.whole_state()
    if dist.get_rank() == 0:
        safetensors.torch.save_file(state, arguments.weights)
        print(json.dumps(losses), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
