"""The other side of benchmarks/serve.h, in Python."""
import json
import sys


def serve(commands):
    """Prints "ready", then answers every line of standard input: the command's result as one line of JSON."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(commands[line.strip()]()), flush=True)
