"""Runs study_model, the study's program, and reads what it measured."""
import json
import os
import re
import subprocess


# By default glibc keeps blocks of up to 32 MB that a program frees, hundreds of megabytes in a training, and a limit of memory counts them.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


class Failure(Exception):
    """What the study cannot go on without."""


class Program:
    """`study_model` of a build, on a text. Its cases go to one file, so that a study which was interrupted goes on."""

    def __init__(self, build, text, folder, time_limit):
        self.path = build / "bin" / "study_model"
        if not self.path.exists():
            raise Failure(f"there is no {self.path}; build it with `cmake --build --preset release --target study_model`")
        if not text.exists():
            raise Failure(f"there is no text {text}; scripts/setup makes .data/text.txt")
        self.text, self.folder, self.time_limit = text, folder, time_limit
        self.tokens = text.stat().st_size - text.stat().st_size // 20  # a twentieth is held out
        self.environment = {**GIVE_BACK, "OMP_NUM_THREADS": "1", **os.environ}

    def weights(self, study):
        return self.folder / f"weights-{study.layers}x{study.width}x{study.sequence}"

    def run(self, *arguments):
        return subprocess.run([self.path, *map(str, arguments)], capture_output=True, text=True, env=self.environment)

    def prepare(self, study, steps):
        """The weights that each case begins with. Returns the loss that they reach."""
        weights = self.weights(study)
        note = weights.with_suffix(".txt")
        if not note.exists():
            done = self.run(self.text, weights, "--prepare", steps, study.layers, study.width, study.sequence)
            if done.returncode != 0:
                raise Failure(f"the weights cannot be made: {done.stderr.strip()}")
            note.write_text(done.stdout)
        return float(re.search(r"loss ([\d.]+)", note.read_text()).group(1))

    def case(self, study, settings):
        """The result of one case, from the file where it has it."""
        settings = {"measure": "step", "layers": study.layers, "width": study.width, "sequence": study.sequence, "limit": "process",
                    "verify": False, "memory_limit_mb": study.limit_mb, "recompute": False, "offload": "none", **settings}
        results, matrix = self.folder / "cases.json", self.folder / "matrix.json"
        matrix.write_text(json.dumps({"cases": [settings], "time_limit_seconds": self.time_limit}))
        done = self.run(self.text, self.weights(study), "--matrix", matrix, "--out", results)
        if not results.exists() or (done.returncode != 0 and done.stderr):
            raise Failure(done.stderr.strip())
        content = json.loads(results.read_text())
        found = [result for result in content["results"] if settings.items() <= result["settings"].items()]
        if not found:
            raise Failure(f"{results} has no result of {settings}")
        return found[-1]

    def about(self):
        content = json.loads((self.folder / "cases.json").read_text())
        return content["machine"], content["versions"]
