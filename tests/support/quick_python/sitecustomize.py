"""Python imports it first, where it is in PYTHONPATH. The search for garbage takes a quarter of what `import torch` and the end of a process
that has done so take."""
import atexit
import gc

gc.disable()
atexit.register(gc.freeze)  # else the interpreter searches at its end
