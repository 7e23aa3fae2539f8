"""One rank of Python's FSDP2 training what `train_gpt --dump-initial` wrote: the same weights, batches and learning rates.

The environment names the rank as under torchrun. Rank 0 prints the losses, means over the ranks, as one line of JSON.
"""
import argparse
import json
import pathlib

import safetensors.torch
import torch
import torch.distributed as dist

from gpt import Gpt, cross_entropy, make_optimizer
from sharding import add_flags, shard


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial", type=pathlib.Path, required=True, help="the folder that train_gpt wrote")
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--clip", type=float, required=True)
    parser.add_argument("--weight-decay", type=float, required=True)
    add_flags(parser)
    return parser.parse_args()


def read_initial(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(safetensors.torch.load_file(file))
    return tensors


def make_model(tensors, heads, kind=Gpt):
    sequence, width = tensors["position_embedding.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    model = kind(layers, width, heads, sequence)
    model.load_state_dict(tensors)
    return model


def train_step(model, optimizer, inputs, targets, clip):
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main():
    arguments = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = read_initial(arguments.initial)
    inputs, targets, rates = (tensors.pop(name) for name in ("inputs", "targets", "learning_rates"))
    model = make_model(tensors, arguments.heads)
    shard(model, arguments, world)
    optimizer = make_optimizer(model, rates[0].item(), arguments.weight_decay)
    losses = []
    for step, rate in enumerate(rates.tolist()):
        for group in optimizer.param_groups:
            group["lr"] = rate
        mine = (batch[step].chunk(world)[rank] for batch in (inputs, targets))
        losses.append(train_step(model, optimizer, *mine, arguments.clip))
    if rank == 0:
        print(json.dumps(losses), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
