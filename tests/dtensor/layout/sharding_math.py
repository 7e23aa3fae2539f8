"""Compares the sharding math with PyTorch's, on seeded cases: sharding_math.py PROGRAM [CASES]."""

import os
import random
import subprocess
import sys

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset


def make_case(rng):
    ndim = rng.randint(1, 4)
    sizes = [rng.choice([0, 1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 30]) for _ in range(ndim)]
    mesh = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    coordinate = [rng.randrange(size) for size in mesh]
    dims = [rng.randint(-1, ndim - 1) for _ in mesh]
    factors = [rng.choice([1, 1, 2, 3, 4]) for _ in mesh]
    return mesh, coordinate, sizes, dims, factors


def placement(dim, factor):
    if dim < 0:
        return Replicate()
    return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)


def main():
    full = os.environ.get("TESSERA_TEST_FULL") == "1"
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 20000 if full else 4000
    rng = random.Random(int(os.environ.get("TESSERA_TEST_SEED", "1")))
    cases = [make_case(rng) for _ in range(count)]
    lines = ["|".join(" ".join(map(str, part)) for part in case) for case in cases]
    answer = subprocess.run([sys.argv[1]], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    answers = answer.stdout.splitlines()
    assert len(answers) == count, f"{len(answers)} answers to {count} cases"
    wrong = 0
    for case, line in zip(cases, answers):
        mesh, coordinate, sizes, dims, factors = case
        placements = [placement(dim, factor) for dim, factor in zip(dims, factors)]
        shape, offset = _compute_local_shape_and_global_offset(sizes, mesh, coordinate, placements)
        ours = tuple(tuple(map(int, part.split())) for part in line.split("|"))
        if ours != (tuple(shape), tuple(offset)):
            wrong += 1
            print(f"{case}: {ours}, PyTorch {tuple(shape)} {tuple(offset)}")
    print(f"{count} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
