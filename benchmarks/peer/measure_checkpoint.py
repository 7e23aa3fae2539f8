"""One rank of a job that saves and loads with torch.distributed.checkpoint, driven by `benchmarks/compare` through standard input.

The tensors, their sharding and the commands are those of measure_checkpoint.cpp.
"""
import argparse
import os
import pathlib
import shutil
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from serve import serve

ROWS, COLUMNS = 4096, 1024


class CheckpointJob:
    def __init__(self, folder, mebibytes):
        self.folder = folder
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,))
        self.state = {
            f"layer.{i}.weight": DTensor.from_local(torch.full((ROWS // ranks, COLUMNS), float(i)), mesh, [Shard(0)])
            for i in range(mebibytes // 16)
        }

    def _clear(self, name):
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            os.sync()

    @staticmethod
    def _seconds_of(work):
        dist.barrier()
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def save(self):
        self._clear("saved")
        return self._seconds_of(lambda: dcp.save(self.state, checkpoint_id=self.folder / "saved"))

    def load(self):
        return self._seconds_of(lambda: dcp.load(self.state, checkpoint_id=self.folder / "saved"))

    def stall(self):
        self._clear("background")
        saving = []
        seconds = self._seconds_of(lambda: saving.append(dcp.async_save(self.state, checkpoint_id=self.folder / "background")))
        saving[0].result()
        return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("mebibytes", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = CheckpointJob(arguments.folder, arguments.mebibytes)
    serve({"save": job.save, "load": job.load, "stall": job.stall})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
