"""What DeepSpeed's own code answers: its loss scaler, its schedules and the arithmetic of its batches, over 5,000 steps each, and its keys.

Usage: deepspeed_answers.py FOLDER, where FOLDER holds DeepSpeed's sources (`scripts/setup --references` brings them to .data/deepspeed).

Prints JSON: for each case its settings, a digest of all numbers (FNV-1a of the doubles' bytes), and the first ones. deepspeed_answers.json
is what it printed; deepspeed_test.cpp computes the same. Only the sources in question are loaded, with small stand-ins for what they
import: the rest of DeepSpeed wants packages and devices.
"""
import ast
import importlib.util
import json
import logging
import math
import pathlib
import struct
import sys
import types

STEPS = 5000
SHOWN = 8


class Digest:
    """FNV-1a over doubles."""

    def __init__(self):
        self.state, self.first = 0xCBF29CE484222325, []

    def add(self, value):
        for byte in struct.pack("<d", value):
            self.state = ((self.state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        if len(self.first) < SHOWN:
            self.first.append(float(value))

    def answer(self):
        return {"digest": f"{self.state:016x}", "first": self.first}


class Draw:
    """The same numbers in Python and in C++."""

    def __init__(self, seed):
        self.state = seed

    def below(self, end):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        return (self.state >> 33) % end


def stand_in(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    module.__path__ = []
    sys.modules[name] = module
    return module


def load(folder, name):
    spec = importlib.util.spec_from_file_location(name, folder / (name.replace(".", "/") + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def methods_of(folder, source, class_name, names, scope):
    """Methods of a class whose module cannot be imported, as functions."""
    tree = ast.parse((folder / source).read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    body = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(body) == len(names), names
    module = ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))
    exec(compile(module, source, "exec"), scope)  # DeepSpeed's own functions
    return [scope[name] for name in names]


def scaler_cases():
    for window in (1, 3, 20, 1000):
        for hysteresis in (1, 2, 5):
            for consecutive in (False, True):
                yield {"kind": "scaler", "initial_scale_power": 16, "loss_scale_window": window, "hysteresis": hysteresis,
                       "consecutive_hysteresis": consecutive, "min_loss_scale": 1, "stays_above": 4, "permille": 1000 // (2 * window + 2), "seed": window * 10 + hysteresis}
    yield {"kind": "scaler", "initial_scale_power": 4, "loss_scale_window": 5, "hysteresis": 2, "consecutive_hysteresis": False,
           "min_loss_scale": 3, "stays_above": 0, "permille": 230, "seed": 7}  # ends at the smallest scale


def answer_scaler(case, loss_scaler):
    scaler = loss_scaler.DynamicLossScaler(init_scale=2**case["initial_scale_power"], scale_window=case["loss_scale_window"],
                                           min_scale=case["min_loss_scale"], delayed_shift=case["hysteresis"],
                                           consecutive_hysteresis=case["consecutive_hysteresis"])
    return run_scaler(case, lambda overflow: scaler.update_scale(overflow), lambda: scaler.cur_scale)


def run_scaler(case, update, scale):
    draw, digest = Draw(case["seed"]), Digest()
    for step in range(STEPS):
        overflow = draw.below(1000) < case["permille"]
        if scale() >= 2.0**40:  # as gradients do then
            overflow = True
        if scale() <= case["stays_above"]:
            overflow = False
        try:
            update(overflow)
        except Exception as error:
            assert "already at minimum" in str(error), error
            return {**case, **digest.answer(), "error_at": step}
        digest.add(scale())
    return {**case, **digest.answer(), "error_at": None}


def stage0_cases():
    for window, permille in ((1, 500), (4, 180), (50, 20)):
        yield {"kind": "stage0", "initial_scale_power": 10, "loss_scale_window": window, "hysteresis": 3, "consecutive_hysteresis": True,
               "min_loss_scale": 2, "stays_above": 0, "permille": permille, "seed": window}


def answer_stage0(case, update_scale, loss_scaler):
    config = loss_scaler.LossScaleConfig(
        loss_scaler.torch.float16, True, 1.0, {"init_scale": 2**case["initial_scale_power"], "scale_window": case["loss_scale_window"],
                                               "min_scale": case["min_loss_scale"]})
    optimizer = types.SimpleNamespace(loss_scale_config=config, verbose=False)
    return run_scaler(case, lambda overflow: update_scale(optimizer, overflow), lambda: config.cur_scale)


def schedule_cases():
    for shape in ("log", "linear"):
        for warmup in (1, 2, 3, 100, 1000):
            yield {"kind": "schedule", "type": "WarmupLR", "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": 3e-4, "warmup_num_steps": warmup, "warmup_type": shape}}
            yield {"kind": "schedule", "type": "WarmupLR", "params": {"warmup_num_steps": warmup, "warmup_type": shape}}
            for total in (1000, 4000, 7777):
                yield {"kind": "schedule", "type": "WarmupDecayLR",
                       "params": {"total_num_steps": total, "warmup_min_lr": 1e-5, "warmup_max_lr": 6e-4, "warmup_num_steps": warmup, "warmup_type": shape}}
                yield {"kind": "schedule", "type": "WarmupCosineLR",
                       "params": {"total_num_steps": total, "warmup_min_ratio": 0.03, "cos_min_ratio": 0.01, "warmup_num_steps": warmup, "warmup_type": shape}}
    yield {"kind": "schedule", "type": "WarmupDecayLR", "params": {"total_num_steps": 2000}}
    yield {"kind": "schedule", "type": "WarmupCosineLR", "params": {"total_num_steps": 2000}}


def answer_schedule(case, lr_schedules, torch):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.013)
    schedule = getattr(lr_schedules, case["type"])(optimizer, **case["params"])
    digest = Digest()
    for _ in range(STEPS):
        digest.add(optimizer.param_groups[0]["lr"])
        schedule.step()
    return {**case, **digest.answer()}


def answer_batches(configure):
    """Random batches of 1 to 3 given numbers; what DeepSpeed makes of them, or nothing where it stops."""
    draw, digest, refused = Draw(11), Digest(), 0
    for _ in range(STEPS):
        ranks = 1 + draw.below(16)
        given = [1 + draw.below(end) if draw.below(4) > 0 else None for end in (256, 16, 8)]
        if draw.below(2) == 0 and given[0] is not None:  # one that divides more often
            given[0] = ranks * (given[1] or 1) * (given[2] or 1) * (1 + draw.below(3))
        config = types.SimpleNamespace(train_batch_size=given[0], train_micro_batch_size_per_gpu=given[1],
                                       gradient_accumulation_steps=given[2], world_size=ranks)
        try:
            configure(config)
            answer = [config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps]
        except AssertionError:
            answer, refused = [-1, -1, -1], refused + 1
        for number in answer:
            digest.add(float(number))
    return {"kind": "batch", "seed": 11, **digest.answer(), "refused": refused}


# Blocks of a config, and the classes that declare their keys.
BLOCKS = [
    ("zero_optimization", "deepspeed/runtime/zero/config.py", "DeepSpeedZeroConfig"),
    ("zero_optimization.offload_optimizer", "deepspeed/runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
    ("zero_optimization.offload_param", "deepspeed/runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    ("fp16", "deepspeed/runtime/precision_config.py", "DeepSpeedFP16Config"),
    ("bf16", "deepspeed/runtime/precision_config.py", "DeepSpeedBF16Config"),
    ("tensorboard", "deepspeed/monitor/config.py", "TensorBoardConfig"),
    ("csv_monitor", "deepspeed/monitor/config.py", "CSVConfig"),
]


def default_of(node):
    """The value of a field's default, where it is a number, a text or a boolean; else None."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -node.operand.value
    if isinstance(node, ast.Attribute) and node.attr == "maxsize":
        return sys.maxsize
    if isinstance(node, ast.Call):
        first = node.args[0] if node.args else next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
        return default_of(first) if first is not None else None
    return None


def keys_of_class(folder, source, class_name):
    tree = ast.parse((folder / source).read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    keys = {}
    for field in found.body:
        if isinstance(field, ast.AnnAssign):
            keywords = field.value.keywords if isinstance(field.value, ast.Call) else []
            alias = next((keyword.value.value for keyword in keywords if keyword.arg == "alias"), field.target.id)
            keys[alias] = default_of(field.value)
    return keys


def keys_on_top(folder):
    """What config.py asks the whole file for, with the constants' defaults."""
    constants = {}
    for node in ast.parse((folder / "deepspeed/runtime/constants.py").read_text()).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = default_of(node.value)
    keys = {}
    for node in ast.walk(ast.parse((folder / "deepspeed/runtime/config.py").read_text())):
        is_question = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "get_scalar_param" and getattr(node.args[0], "id", "") == "param_dict"
        if is_question and all(getattr(argument, "id", "") in constants for argument in node.args[1:]):
            name, default = (constants[argument.id] for argument in node.args[1:])
            keys[name] = default
    return keys


def answer_keys(folder):
    yield {"kind": "keys", "block": "", "keys": keys_on_top(folder)}
    for block, source, class_name in BLOCKS:
        yield {"kind": "keys", "block": block, "keys": keys_of_class(folder, source, class_name)}


def main():
    import torch
    folder = pathlib.Path(sys.argv[1])
    logger = logging.getLogger("deepspeed")
    logger.setLevel(logging.CRITICAL)
    comm = stand_in("deepspeed.comm", get_rank=lambda: 1)
    stand_in("deepspeed", comm=comm)
    stand_in("deepspeed.utils", logger=logger)
    stand_in("deepspeed.runtime")
    stand_in("deepspeed.runtime.config_utils", DeepSpeedConfigObject=object)
    stand_in("deepspeed.runtime.utils", has_inf_or_nan=None)
    loss_scaler = load(folder, "deepspeed.runtime.fp16.loss_scaler")
    lr_schedules = load(folder, "deepspeed.runtime.lr_schedules")
    lr_schedules.get_torch_optimizer = lambda optimizer: optimizer
    (update_scale,) = methods_of(folder, "deepspeed/runtime/fp16/fused_optimizer.py", "FP16_Optimizer", ["_update_scale"], {"logger": logger})
    set_batch, check_batch = methods_of(folder, "deepspeed/runtime/config.py", "DeepSpeedConfig",
                                        ["_set_batch_related_parameters", "_batch_assertion"], {})
    answers = [answer_scaler(case, loss_scaler) for case in scaler_cases()]
    answers += [answer_stage0(case, update_scale, loss_scaler) for case in stage0_cases()]
    answers += [answer_schedule(case, lr_schedules, torch) for case in schedule_cases()]
    answers += answer_keys(folder)
    answers.append(answer_batches(lambda config: (set_batch(config), check_batch(config))))
    version = (folder / "version.txt").read_text().strip()
    print('{"version": "%s", "steps": %d, "cases": [' % (version, STEPS))
    print(",\n".join(json.dumps(answer) for answer in answers))
    print("]}")


if __name__ == "__main__":
    main()
