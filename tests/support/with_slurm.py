#!/usr/bin/env python3
"""with_slurm.py COMMAND...: runs a command, with srun in it, under a Slurm of this machine alone that ends with it.

Everything lies in a temporary folder. Exits with the command's status, or with 77 and a message where Slurm is not installed.
"""
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
DAEMONS = ["munged", "slurmctld", "slurmd"]
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={other_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmUser={user}
SlurmdUser={user}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port():
    """Below those that the system gives to whoever asks for any."""
    while True:
        port = random.randrange(12000, 20000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def write_configuration(folder):
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=socket.gethostname().split(".")[0], port=free_port(),
                                                            other_port=free_port(), folder=folder, user=user, cores=os.cpu_count()))


def start_daemons(folder, environment):
    munge = [f"--{option}={folder}/munge.{end}" for option, end in
             (("socket", "socket"), ("key-file", "key"), ("log-file", "log"), ("pid-file", "pid"), ("seed-file", "seed"))]
    commands = [["munged", "--foreground", "--force", *munge], ["slurmctld", "-D", "-i"], ["slurmd", "-D"]]
    processes = []
    for command in commands:
        with open(folder / f"{command[0]}.out", "w") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
    return processes


def wait_until_idle(folder, environment):
    for _ in range(300):
        state = subprocess.run(["sinfo", "--noheader", "--format", "%T"], env=environment, capture_output=True, text=True)
        if state.stdout.strip() == "idle":
            return
        time.sleep(0.1)
    logs = "\n".join((folder / f"{name}.out").read_text() for name in DAEMONS)
    sys.exit(f"with_slurm.py: Slurm did not start:\n{logs}")


def main():
    for program in [*DAEMONS, "srun"]:
        if not shutil.which(program, path=PATH):
            print(f"with_slurm.py: there is no {program}; on Debian: apt-get install slurm-wlm munge", file=sys.stderr)
            return SKIPPED
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = pathlib.Path(name)
        environment = dict(os.environ, PATH=PATH, SLURM_CONF=str(folder / "slurm.conf"))
        write_configuration(folder)
        daemons = start_daemons(folder, environment)
        try:
            wait_until_idle(folder, environment)
            return subprocess.run(sys.argv[1:], env=environment).returncode
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait()


if __name__ == "__main__":
    sys.exit(main())
