"""What tessera-bench wrote."""
import dataclasses
import json
import os

FORMAT, VERSION = "tessera-bench", 1
LARGEST = 1e18  # of any figure
STATUSES = ["ok", "does not fit", "impossible", "time limit", "died", "wrong", "failed"]
SETTINGS = {"measure": str, "model": str, "layers": int, "width": int, "batch": int, "sequence": int, "ranks": int, "mesh": str,
            "strategy": str, "layout": str, "reshard": str, "precision": str, "transport": str, "offload": str, "recompute": bool,
            "transition": str, "steps": int, "memory_limit_mb": int}


class Failure(Exception):
    """An input that cannot be used; the text names the file."""


@dataclasses.dataclass
class Case:
    settings: dict
    status: str
    message: str
    measured: dict
    file: str = ""  # as labels_of calls it

    def __getattr__(self, name):
        try:
            return self.__dict__["settings"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def ok(self):
        return self.status == "ok"

    @property
    def milliseconds(self):
        return self.measured["milliseconds"]["p50"]

    @property
    def sent_bytes(self):
        return sum(kind["bytes"] for kind in self.measured["sent"].values())


@dataclasses.dataclass
class File:
    name: str
    machine: dict
    versions: dict
    cases: list


def check(condition, file, what):
    if not condition:
        raise Failure(f"{file}: {what}")


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LARGEST


def read_case(file, label, number, result):
    where = f"result {number}"
    check(isinstance(result, dict), file, f"{where} is no object")
    settings, status = result.get("settings"), result.get("status")
    check(isinstance(settings, dict), file, f"{where} has no settings")
    for name, kind in SETTINGS.items():
        check(type(settings.get(name)) is kind and (kind is not int or is_number(settings[name])), file, f"{where}: its setting {name} is {settings.get(name)!r}")
    check(status in STATUSES, file, f"{where}: its status is {status!r}")
    measured = result.get("measured", {})
    if status == "ok":
        check(isinstance(measured, dict) and isinstance(measured.get("milliseconds"), dict), file, f"{where} has no times")
        check(all(is_number(value) for value in measured["milliseconds"].values()), file, f"{where}: a time is no number")
        for name in ("exposed_milliseconds", "peak_bytes", "state_bytes"):
            check(is_number(measured.get(name)), file, f"{where}: its {name} is {measured.get(name)!r}")
        check("p50" in measured["milliseconds"], file, f"{where} has no median time")
        check(measured["milliseconds"]["p50"] > 0, file, f"{where} took no time")
        sent, parts = measured.get("sent"), measured.get("parts", {})
        is_counted = isinstance(sent, dict) and all(isinstance(kind, dict) and is_number(kind.get("bytes")) for kind in sent.values())
        check(is_counted, file, f"{where} does not say what was sent")
        check(isinstance(parts, dict) and all(map(is_number, parts.values())), file, f"{where}: its parts are no times")
        check(settings["measure"] != "step" or measured["milliseconds"].get("mean", 0) > 0, file, f"{where} has no mean time")
        for name in ("items_per_second", "explained_peak_bytes"):
            check(name not in measured or is_number(measured[name]), file, f"{where}: its {name} is {measured.get(name)!r}")
        check(settings["measure"] != "step" or "items_per_second" in measured, file, f"{where} has no throughput")
    return Case(settings, status, str(result.get("message", "")), measured, label)


def labels_of(files):
    """The stem of each, or, of several files with one stem, the path from the folder that holds them all."""
    labels = []
    for file in files:
        alike = [os.path.abspath(other) for other in files if other.stem == file.stem]
        above = os.path.commonpath([os.path.dirname(other) for other in alike])
        labels.append(file.stem if len(alike) == 1 else os.path.relpath(os.path.abspath(file), above))
    return labels


def read_all(files):
    places = [os.path.realpath(file) for file in files]
    for file, place in zip(files, places):
        check(places.count(place) == 1, file, "is named twice")
    return [read(file, label) for file, label in zip(files, labels_of(files))]


def read(file, label=None):
    """Its cases have `label` for the file, or the file's stem."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise Failure(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Failure(f"{file}: no whole JSON: {error}") from error
    check(isinstance(content, dict) and content.get("format") == FORMAT, file, "no results of tessera-bench")
    check(content.get("version") == VERSION and content["version"] is not True, file, f"its version is {content.get('version')!r}, but this tessera-report reads {VERSION}")
    for name in ("machine", "versions"):
        check(isinstance(content.get(name), dict), file, f"it does not say its {name}")
    check(isinstance(content.get("results"), list) and content["results"], file, "it has no results")
    cases = [read_case(file, label or file.stem, number, result) for number, result in enumerate(content["results"])]
    return File(str(file), content["machine"], content["versions"], cases)
