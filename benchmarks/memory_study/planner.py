"""What tessera-plan says of a case. The study's model has the shapes of a GPT-2 whose tokens are bytes."""
import json
import subprocess

HEADS, VOCABULARY = 8, 256
PLACES = {"none": "device", "host": "host", "files": "files"}


def machine_of(ranks, limit_mb):
    """A host without an accelerator. The rates are needed for times, which are not asked for."""
    link = {"alpha": 1e-5, "beta": 1e-9}
    return {"name": "this host", "hosts": 1, "ranks_a_host": ranks, "device": "cpu", "memory_bytes": limit_mb * 1e6,
            "flops_per_second": {"fp32": 5e10, "bf16": 5e10}, "efficiency": 0.7, "memory_bytes_per_second": 1e10, "launch_seconds": 5e-6,
            "host_bytes_per_second": 1e10, "in_host": link, "between_hosts": link}


def model_of(study):
    return {"architectures": ["GPT2LMHeadModel"], "n_embd": study.width, "n_layer": study.layers, "n_head": HEADS, "vocab_size": VOCABULARY,
            "n_positions": study.sequence, "activation_function": "gelu", "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def planned_peak(planner, study, settings, folder):
    """The bytes of a rank at the peak; None where there is no such program, or it cannot say."""
    if not planner.exists():
        return None
    model, machine = folder / "planned_model.json", folder / "planned_machine.json"
    model.write_text(json.dumps(model_of(study)))
    machine.write_text(json.dumps(machine_of(settings["ranks"], study.limit_mb)))
    mesh = f"{'replicate' if settings['strategy'] == 'no-shard' else 'shard'}={settings['ranks']}"
    flags = {"machine": machine, "ranks": settings["ranks"], "sequence": study.sequence, "rows": settings["batch"], "mesh": mesh,
             "strategy": settings["strategy"], "precision": "fp32", "optimizer": "AdamW", "recompute": "on" if settings.get("recompute") else "off",
             "offload": PLACES[settings.get("offload", "none")], "json": "-"}
    done = subprocess.run([planner, model, "--predict", *(f"--{name}={value}" for name, value in flags.items())], capture_output=True, text=True)
    try:
        return sum(json.loads(done.stdout)["memory"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
