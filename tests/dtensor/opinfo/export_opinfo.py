"""Writes the operator calls behind PyTorch's OpInfo samples to a folder, one file an OpInfo: export_opinfo.py FOLDER [NAME...].

Without names: some OpInfos, drawn with TESSERA_TEST_SEED (default 1), and all of them with TESSERA_TEST_FULL=1.

Every file is a pickle that torch::pickle_load reads: a list of (operator, arguments), the operators as a caller of the C++ API
calls them ("aten::layer_norm."), the arguments in the order of the schema, defaults filled in. Calls of in-place variants are
among them. Enumerations are written as their numbers, complex numbers as ("complex", real, imaginary)."""

import os
import pathlib
import random
import sys
import types
import unittest
import warnings

sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False))  # not needed here

import torch  # noqa: E402
from torch._dispatch.python import enable_python_dispatcher  # noqa: E402
from torch._subclasses.schema_check_mode import SchemaCheckMode  # noqa: E402
from torch.testing._internal import common_methods_invocations as opinfos  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

DTYPES = [torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128]  # the first that an operator supports
SCALAR_TYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, None,
                torch.complex64, torch.complex128, torch.bool, None, None, None, torch.bfloat16]
MEMORY_FORMATS = [torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d]
LARGEST = 20_000  # elements of a call
CALLS = 400  # of one OpInfo
DRAWN = 150  # OpInfos: those of which opinfo_test.cpp draws, where some have no calls


class Unsupported(Exception):
    """An argument that has no place in a file."""


def encode(value):
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise Unsupported(value.layout)
        return value.detach().clone().requires_grad_(value.requires_grad)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, complex):
        return ("complex", value.real, value.imag)
    if isinstance(value, (list, tuple)):
        return [encode(element) for element in value]
    if isinstance(value, torch.dtype):
        return SCALAR_TYPES.index(value)
    if isinstance(value, torch.memory_format):
        return MEMORY_FORMATS.index(value)
    if isinstance(value, torch.layout):
        return 0
    if isinstance(value, torch.device):
        return str(value)
    raise Unsupported(type(value))


def elements(value):
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(elements, value)) if isinstance(value, (list, tuple)) else 0


def describe(value):
    """What makes a call another one: shapes and values of what is no tensor."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.requires_grad}"
    return f"[{','.join(map(describe, value))}]" if isinstance(value, list) else repr(value)


class Recorder(SchemaCheckMode):  # above autograd, PyTorch allows only its own modes
    """Records the operators that are called from outside, above autograd."""

    def __init__(self):
        TorchDispatchMode.__init__(self, _dispatch_key=torch._C.DispatchKey.PreDispatch)
        self.calls, self.seen = [], set()

    def record(self, func, args, kwargs):
        schema = func._schema
        values = []
        for position, argument in enumerate(schema.arguments):
            if position < len(args):
                values.append(args[position])
            else:
                values.append(kwargs.get(argument.name, argument.default_value))
        if elements(values) > LARGEST or len(self.calls) >= CALLS or not any(elements([v]) or isinstance(v, torch.Tensor) or isinstance(v, (list, tuple)) for v in values):
            return
        try:
            values = [encode(value) for value in values]
        except Unsupported:
            return
        name = f"{schema.name}.{schema.overload_name}"
        key = name + describe(values)
        if key not in self.seen:
            self.seen.add(key)
            self.calls.append((name, values))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(clone(element) for element in value) if isinstance(value, (list, tuple)) else value


def attempt(call):
    try:
        call()
    except Exception:  # a sample that the operator refuses
        pass


def record_samples(info, recorder):
    dtype = next((dtype for dtype in DTYPES if dtype in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    differentiable = dtype.is_floating_point and info.supports_autograd
    inplace = info.get_inplace() if hasattr(info, "get_inplace") else getattr(info, "inplace_variant", None)
    for sample in info.sample_inputs("cpu", dtype, requires_grad=differentiable):
        with enable_python_dispatcher(), recorder:
            attempt(lambda: info.op(sample.input, *sample.args, **sample.kwargs))
            if inplace is not None:
                attempt(lambda: inplace(clone(sample.input), *sample.args, **sample.kwargs))
        if len(recorder.calls) >= CALLS:
            return


def record_foreach(info, recorder):
    for sample in info.sample_inputs("cpu", torch.float64, noncontiguous=False):
        with enable_python_dispatcher(), recorder:
            for function in (info.method_variant, info.inplace_variant):
                if function is not None:
                    attempt(lambda: function([tensor.clone() for tensor in sample.input], *sample.args, **sample.kwargs))


def name_of(info):
    return info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")


def choose(recorders, names):
    """(OpInfo, what records it) of those that this run exports."""
    if names:
        return [(info, record) for info, record in recorders if name_of(info) in names]
    if os.environ.get("TESSERA_TEST_FULL") == "1":
        return recorders
    return random.Random(int(os.environ.get("TESSERA_TEST_SEED", "1"))).sample(recorders, DRAWN)


def main():
    folder, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    for file in [] if names else folder.glob("*.pt"):  # of another draw
        file.unlink()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    foreach = [info for name in dir(opinfos) if name.startswith("foreach_") and name.endswith("_op_db") for info in getattr(opinfos, name)]
    recorders = [*((info, record_samples) for info in opinfos.op_db), *((info, record_foreach) for info in foreach)]
    written = 0
    for info, record in choose(recorders, names):
        torch.manual_seed(1)
        recorder = Recorder()
        try:
            record(info, recorder)
        except Exception as error:
            print(f"{name_of(info)}: {error}", file=sys.stderr)
        if recorder.calls:
            torch.save([list(call) for call in recorder.calls], folder / f"{name_of(info)}.pt")
            written += len(recorder.calls)
    (folder / "complete").write_text(f"{torch.__version__}\n")
    print(f"{written} calls")


if __name__ == "__main__":
    main()
