"""The other side of benchmarks/serve.h, in Python."""
import json
import sys
import time


def serve(commands):
    """Prints "ready", then answers every line of standard input: the command's result as one line of JSON."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(commands[line.strip()]()), flush=True)


def seconds_of(parts):
    """Seconds of each part of a step, and of all of it: `parts` stops after each to give its name."""
    begin = last = time.perf_counter()
    seconds = {}
    for part in parts:
        now = time.perf_counter()
        seconds[part], last = now - last, now
    return {**seconds, "step": last - begin}
