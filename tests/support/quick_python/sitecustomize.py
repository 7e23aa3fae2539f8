"""Python imports it first, where it is in PYTHONPATH. The search for garbage takes a quarter of an `import torch` and of the end of
a process that has done so."""
import atexit
import gc

gc.disable()
atexit.register(gc.freeze)  # else the interpreter searches at its end
