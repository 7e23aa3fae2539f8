"""Ranks on two simulated hosts, which a slow link joins."""
from .processes import ROOT
from .processes import run as run_program

RATE, DELAY = "1gbit", "1ms"
LINK = "1 Gbit/s, 1 ms"


def on_both_hosts(command, ranks_of_a_host, variables=None):
    """What the ranks print together. Each runs `command` in a shell, with the rank variables of torchrun."""
    ranks = " ".join(map(str, range(ranks_of_a_host)))
    script = (f"for local in {ranks}; do export LOCAL_RANK=$local RANK=$(({ranks_of_a_host} * {{host}} + local)); ({command}) & done; "
              "status=0; for job in $(jobs -p); do wait $job || status=$?; done; exit $status")
    job = {"WORLD_SIZE": 2 * ranks_of_a_host, "MASTER_ADDR": "10.99.0.1", "MASTER_PORT": 29533, **(variables or {})}
    environment = [f"{name}={value}" for name, value in job.items()]
    hosts = [str(ROOT / "scripts" / "two-hosts"), "--rate", RATE, "--delay", DELAY]
    return run_program(["env", *environment, *hosts, "bash", "-c", script], timeout=600)
