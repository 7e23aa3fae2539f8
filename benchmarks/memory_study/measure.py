"""The rows of a study: each method at the largest batch that fits."""
from .planner import planned_peak
from .search import largest

BESIDE_TENSORS = 70e6  # bytes that a rank's process takes about, where the search begins: stacks, libraries' own buffers


def how_it_failed(result, rows):
    message = " ".join(result.get("message", "").split())
    return {"batch": rows, "status": result["status"], "message": message[:300]}


def rows_that_fit(peaks, limit):
    """How many rows stay below the limit, by the predicted peaks of one row, two, and so on."""
    return sum(peak <= limit for peak in peaks)


def measure_method(program, study, method, ranks, steps, planner):
    """One row, as study.json has it."""
    settings = {**method.settings, "ranks": ranks}
    row = {"method": method.name, "settings": method.settings, "largest_batch": 0}
    prediction = program.case(study, {**settings, "measure": "explain", "batch": study.most_rows})
    if prediction["status"] != "ok":
        return {**row, "fails": how_it_failed(prediction, study.most_rows)}
    explained = prediction["measured"]
    results = {}

    def fits(rows):
        results[rows] = program.case(study, {**settings, "batch": rows, "steps": steps})
        return results[rows]["status"] == "ok"

    guess = rows_that_fit(explained["explained_peaks"], study.limit_mb * 1e6 - BESIDE_TENSORS)
    rows = largest(fits, study.most_rows, guess)
    failed = [tried for tried in sorted(results) if results[tried]["status"] != "ok"]
    row.update({"largest_batch": rows, "reached_most_rows": rows == study.most_rows, "parameters": explained["parameters"],
                "predicted_largest_batch": explained["explained_largest_batch"],
                "explained_peak_bytes": explained["explained_peaks"][max(rows, 1) - 1],
                "planned_peak_bytes": planned_peak(planner, study, {**settings, "batch": max(rows, 1)}, program.folder)})
    if failed:
        row["fails"] = how_it_failed(results[failed[0]], failed[0])
    if rows:
        row.update(figures_of(results[rows]["measured"], program.tokens))
    return row


def figures_of(measured, tokens):
    """Of the batch that fits. An epoch is all tokens of the text that are not held out, at the speed of the measured steps."""
    kept = ["peak_bytes", "state_bytes", "process_peak_bytes", "group_peak_bytes", "items_per_second", "limited_by", "losses"]
    return {"steps": measured["runs"], "step_seconds": measured["milliseconds"]["mean"] / 1e3,
            "epoch_seconds": tokens / measured["items_per_second"], **{name: measured[name] for name in kept if name in measured}}
