"""Starts the programs that are compared, one process a rank, and talks to them."""
import importlib.util
import json
import os
import pathlib
import queue
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PEER = ROOT / "benchmarks" / "peer"


class Failure(Exception):
    """A program that was started did not do what it should."""


class Programs:
    """Where the programs are."""

    def __init__(self, build):
        self.bin = build.resolve() / "bin"
        self.python = ROOT / ".venv" / "bin" / "python"
        if not self.python.exists():  # beside another PyTorch, where scripts/test-gpu has unpacked the programs
            if importlib.util.find_spec("torch") is None:
                raise Failure(f"there is no {self.python}; run scripts/setup")
            self.python = pathlib.Path(sys.executable)

    def ours(self, name):
        program = self.bin / name
        if not program.exists():
            raise Failure(f"there is no {program}; build it with `cmake --build --preset release`")
        return [str(program)]

    def peer(self, name):
        return [str(self.python), str(PEER / name)]


def environment():
    """One thread a rank on both sides; everything else as it is."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(command, timeout):
    """Runs one command to its end."""
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Failure(f"`{' '.join(command)}` took longer than {timeout} s") from None
    if done.returncode != 0:
        raise Failure(f"`{' '.join(command)}` ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def free_port():
    """A free port that the system gives to nobody who asks for any port: a port it chose itself may go to another program, or to another
    rank's connection, before rank 0 listens there."""
    lowest_of_the_system = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest_of_the_system // 2, lowest_of_the_system)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


class Ranks:
    """`count` processes of one command, with the rank variables of torchrun, in one job or each in one of its own. A context manager:
    leaving it ends them."""

    def __init__(self, command, count, timeout=300, apart=False):
        self.command, self.timeout = command, timeout
        self.processes, self.answers, self.errors = [], [], []
        world, port = 1 if apart else count, free_port()
        for process in range(count):
            rank = 0 if apart else process
            self._start({**environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port() if apart else port),
                         "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)})

    def _start(self, variables):
        errors = tempfile.TemporaryFile(mode="w+")
        process = subprocess.Popen(self.command, cwd=ROOT, env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=errors)
        lines = queue.Queue()
        threading.Thread(target=self._read, args=(process.stdout, lines), daemon=True).start()
        self.processes.append(process)
        self.errors.append(errors)
        self.answers.append(lines)

    @staticmethod
    def _read(stream, lines):
        for line in stream:
            lines.put(line.strip())
        lines.put(None)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def _fail(self, rank, what):
        for process in self.processes:
            process.kill()
        self.errors[rank].seek(0)
        raise Failure(f"rank {rank} of `{' '.join(self.command)}` {what}:\n{self.errors[rank].read()[-4000:]}")

    def lines(self, ranks=None):
        """The next line of each rank's output."""
        deadline, result = time.monotonic() + self.timeout, []
        for rank in range(len(self.processes)) if ranks is None else ranks:
            try:
                line = self.answers[rank].get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                self._fail(rank, f"gave no answer in {self.timeout} s")
            if line is None:
                self._fail(rank, "ended early")
            result.append(line)
        return result

    def wait_until_ready(self):
        for rank, line in enumerate(self.lines()):
            if line != "ready":
                self._fail(rank, f"printed {line!r} in place of 'ready'")

    def ask(self, command):
        """Sends a command to every rank, and returns their answers."""
        for rank, process in enumerate(self.processes):
            try:
                process.stdin.write(command + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                self._fail(rank, "ended early")
        return [json.loads(line) for line in self.lines()]

    def close(self):
        """Ends the input of all ranks and waits for them; those that stay are killed."""
        for process in self.processes:
            if not process.stdin.closed:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for errors in self.errors:
            errors.close()


def interleaved(rounds, warm_up, measurements):
    """Runs the measurements in turn, `warm_up` + `rounds` times; what they returned in the rounds, by name."""
    values = {name: [] for name in measurements}
    for turn in range(warm_up + rounds):
        for name, measure in measurements.items():
            value = measure()
            if turn >= warm_up:
                values[name].append(value)
    return values
