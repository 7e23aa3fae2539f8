"""Runs a function on some ranks of this host, each a fork of this process, with a store on the loopback address."""
import datetime
import multiprocessing
import os
import socket
import sys
import time
import traceback

import torch
import torch.distributed as dist

import tessera_backend  # noqa: F401  registers the backend

LIMIT = 120  # seconds for all ranks
TIMEOUT = datetime.timedelta(seconds=60)  # of a collective


class Failed(AssertionError):
    """A rank did not return."""


def run(ranks, function, *arguments, backend="tessera", timeout=TIMEOUT, may_end=()):
    """What `function(*arguments)` returns on each rank, inside of a process group; None for the ranks of `may_end` that have ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes, pipes = [], []
    for rank in range(ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_be_rank, args=(there, listener, rank, ranks, backend, timeout, function, arguments))
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    # After the forks, none of which has its thread, or what that thread had locked.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        return _results(processes, pipes, may_end)
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def _results(processes, pipes, may_end):
    deadline, results = time.monotonic() + LIMIT, []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(max(0, deadline - time.monotonic())):
            raise Failed(f"rank {rank} gave no result in {LIMIT} s")
        try:
            worked, result = pipe.recv()
        except EOFError:
            worked, result = rank in may_end, None
        if not worked:
            raise Failed(f"rank {rank} failed: {result or 'it ended'}")
        results.append(result)
    return results


def _be_rank(pipe, listener, rank, ranks, backend, timeout, function, arguments):
    port = listener.getsockname()[1]
    listener.close()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
        result = function(*arguments)
        pipe.send((True, result))
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:  # noqa: B902  to be told to the parent
        pipe.send((False, traceback.format_exc()))
    sys.stderr.flush()
    os._exit(0)


def error_of(function, *arguments, **options):
    """The text of the error that a call ends with."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return str(error)
    raise AssertionError("there was no error")
