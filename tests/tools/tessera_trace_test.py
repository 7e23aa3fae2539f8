"""tessera-trace on records that are made here: what it says of them, and the errors for what is no record."""
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

sys.dont_write_bytecode = True  # beside the tool
TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools/trace/tessera-trace"
loader = importlib.machinery.SourceFileLoader("tessera_trace", str(TOOL))
tool = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
sys.modules[loader.name] = tool  # where dataclasses look
loader.exec_module(tool)
SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND


class Rank:
    """The record of one rank, at second 100 of the job."""

    def __init__(self, rank, world_size, **fields):
        self.rank = rank
        self.record = {"format": "tessera trace", "version": 1, "job": "job", "rank": rank, "world_size": world_size, "host": f"host{rank // 2}",
                       "pid": 1000 + rank, "reason": "SIGUSR1", "written_ns": START + 100 * SECOND, "capacity": 1000, "issued": 0, "groups": [],
                       "calls": [], **fields}

    def group(self, name, ranks, device="cpu"):
        self.record["groups"].append({"name": name, "device": device, "ranks": ranks, "issued": 0, "messages": []})
        return self

    def call(self, what, label, group=0, state="done", at=1, **fields):
        call = {"number": self.record["issued"], "group": group, "what": what, "state": state, "thread": 7,
                "issued_ns": START + int(at * SECOND), "awaited_ns": None if state == "issued" else START + int((at + 1) * SECOND),
                "ended_ns": START + int((at + 2) * SECOND) if state in ("done", "failed", "refused") else None, **fields}
        if what != "connect":
            call["label"] = label
        if what not in ("connect", "barrier"):
            call.setdefault("bytes", 64), call.setdefault("dtype", "Float")
        if what in ("send", "receive"):
            ends = (self.rank, fields["peer"]) if what == "send" else (fields["peer"], self.rank)
            messages = self.record["groups"][group]["messages"]
            call["sequence"] = sum(message["count"] for message in messages if (message["from"], message["to"]) == ends)
            messages[:] = [message for message in messages if (message["from"], message["to"]) != ends]
            messages.append({"from": ends[0], "to": ends[1], "count": call["sequence"] + 1})
        elif what != "connect" and state != "refused":
            call["sequence"] = self.record["groups"][group]["issued"]
            self.record["groups"][group]["issued"] += 1
        self.record["calls"].append(call)
        self.record["issued"] += 1
        return self


class Trace(unittest.TestCase):
    def setUp(self):
        stack = contextlib.ExitStack()
        self.folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.addCleanup(stack.close)

    def write(self, *ranks):
        for rank in ranks:
            (self.folder / f"rank-{rank.rank}.json").write_text(json.dumps(rank.record))

    def run_tool(self, *arguments):
        """As the command does, in this process: starting an interpreter takes longer than the tool does."""
        output, status = io.StringIO(), 0
        with mock.patch.object(sys, "argv", [str(TOOL), *map(str, arguments)]), contextlib.redirect_stdout(output):
            try:
                tool.main()
            except SystemExit as end:
                status = end.code
        return subprocess.CompletedProcess(arguments, int(status != 0), output.getvalue(), f"{status}\n" if status else "")

    def test_the_command(self):
        self.write(Rank(0, 1).group("default", [0]).call("barrier", "x"))
        self.assertEqual(subprocess.run([TOOL, self.folder], capture_output=True, text=True, timeout=60).stdout, self.report())
        failed = subprocess.run([TOOL, self.folder / "none"], capture_output=True, text=True, timeout=60)
        self.assertEqual((failed.returncode, failed.stdout), (1, ""))
        self.assertEqual(failed.stderr, f"tessera-trace: {self.folder}/none: No such file or directory\n")

    def report(self, *ranks):
        self.write(*ranks)
        result = self.run_tool(self.folder)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return result.stdout

    def assert_error(self, *parts):
        result = self.run_tool(self.folder)
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertTrue(result.stderr.startswith("tessera-trace: "), result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for part in parts:
            self.assertIn(part, result.stderr)

    def test_a_job_that_agrees(self):
        for world_size in (1, 2, 4):
            ranks = [Rank(r, world_size).group("default", list(range(world_size))).call("connect", "").call("all_reduce", "loss", op="sum")
                     for r in range(world_size)]
            text = self.report(*ranks)
            self.assertIn(f"Job job of {world_size} ranks\n", text)
            self.assertIn("Nobody waits for a rank that has not made its call.\n", text)
            self.assertIn("The ranks agree in all calls that they have recorded.\n", text)
            numbers = {1: "0   ", 2: "0, 1", 4: "0-3 "}[world_size]
            self.assertIn(f"\n  {numbers}  1      #0 all_reduce 'loss' (64 bytes of Float, sum)  done 97.0 s ago\n", text)

    def test_who_waits_for_whom(self):
        ranks = [Rank(r, 4).group("default", [0, 1, 2, 3]).call("connect", "").call("barrier", "first") for r in range(4)]
        for rank in (0, 1, 3):
            ranks[rank].call("all_gather", "blocks.1", state="awaited", at=50)
        text = self.report(*ranks)
        self.assertIn("  ranks 0, 1, 3 wait in #1 all_gather 'blocks.1' (64 bytes of Float) of group default [0, 1, 2, 3]\n"
                      "    for rank 2: last call in it: #0 barrier 'first'\n", text)
        self.assertIn("Rank 2 is waited for, and waits for nobody.\n", text)
        self.assertIn("  0, 1, 3  2      #1 all_gather 'blocks.1' (64 bytes of Float)  waits since 49.0 s\n", text)
        self.assertIn("  2        1      #0 barrier 'first'", text)

    def test_a_chain_of_waits_over_two_groups_ends_at_its_cause(self):
        rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        ranks = [Rank(r, 4).group("rows", rows[r // 2]).group("columns", columns[r % 2]) for r in range(4)]
        ranks[0].call("all_reduce", "a", group=0, state="awaited")
        ranks[1].call("all_reduce", "b", group=1, state="awaited")
        ranks[2].call("all_reduce", "c", group=1, state="awaited")
        text = self.report(*ranks)
        self.assertIn("rank 0 waits in #0 all_reduce 'a' (64 bytes of Float) of group rows [0, 1]\n    for rank 1: no call in it\n", text)
        self.assertIn("rank 1 waits in #0 all_reduce 'b' (64 bytes of Float) of group columns [1, 3]\n    for rank 3: no call in it\n", text)
        self.assertIn("Rank 3 is waited for, and waits for nobody.\n", text)

    def test_a_circle_of_messages(self):
        ranks = [Rank(r, 2).group("pair", [0, 1]).call("send", "x", state="done", peer=1 - r).call("receive", "x", peer=1 - r)
                 .call("receive", "y", state="awaited", peer=1 - r) for r in range(2)]
        text = self.report(*ranks)
        self.assertIn("rank 0 waits in #1 receive 'y' (64 bytes of Float, from rank 1) of group pair [0, 1]\n"
                      "    for rank 1: last call in it: #0 send 'x' (64 bytes of Float, to rank 0)\n", text)
        self.assertIn("Ranks 0, 1 wait for one another in a circle.\n", text)

    def test_a_message_waits_for_its_other_end_alone(self):
        ranks = [Rank(r, 3).group("all", [0, 1, 2]) for r in range(3)]
        ranks[0].call("send", "x", state="awaited", peer=2)
        self.assertIn("of group all [0, 1, 2]\n    for rank 2: no call in it\n", self.report(*ranks))

    def test_ranks_without_a_file_and_groups_not_made(self):
        ranks = [Rank(r, 8).group("all", list(range(8))).call("connect", "", state="awaited") for r in (0, 1, 5)]
        text = self.report(*ranks, Rank(6, 8))
        self.assertIn("of 8 ranks; no file of ranks 2-4, 7\n", text)
        self.assertIn("ranks 0, 1, 5 wait in connect of group all [0, 1, 2, 3, 4, 5, 6, 7]\n    for ranks 2-4, 7: no file\n"
                      "    for rank 6: no such group so far\n", text)
        self.assertIn("Ranks 2-4, 7 are waited for, and have no file.\nRank 6 is waited for, and waits for nobody.\n", text)

    def test_the_first_difference(self):
        base = {"bytes": 64, "dtype": "Float", "op": "sum", "label": "x"}
        for changed in ({"bytes": 128}, {"dtype": "Half"}, {"op": "max"}, {"label": "y"}, {"what": "reduce_scatter"}):
            ranks = [Rank(r, 4).group("default", [0, 1, 2, 3]).call("all_reduce", "same", op="sum") for r in range(4)]
            for rank in ranks:
                fields = {"what": "all_reduce", **base, **(changed if rank.rank == 2 else {})}
                rank.call(fields.pop("what"), fields.pop("label"), state="failed", failure="they differ\nand more", **fields)
                rank.call("all_reduce", f"also different {rank.rank}")
            text = self.report(*ranks)
            self.assertIn("The first call in which the ranks of a group differ\n  group default [0, 1, 2, 3]\n    ranks 0, 1, 3: #1 all_reduce 'x'", text)
            described = {**base, **changed}
            self.assertIn(f"    rank 2: #1 {described.get('what', 'all_reduce')} '{described['label']}' ({described['bytes']} bytes of "
                          f"{described['dtype']}, {described['op']})\n", text)
            self.assertNotIn("also different 0'\n    rank", text)
            self.assertIn("  rank 3: #1 all_reduce 'x' (64 bytes of Float, sum) of group default [0, 1, 2, 3]\n    they differ\n", text)

    def test_what_may_differ(self):
        ranks = [Rank(r, 2).group("default", [0, 1]).call("all_to_all", "tokens", bytes=100 + r).call("broadcast", "w", peer=1)
                 .call("broadcast", "refused here", state="refused" if r else "done", peer=1) for r in range(2)]
        ranks[0].call("send", "m", peer=1)
        ranks[1].call("broadcast", "refused here", peer=1).call("receive", "m", peer=0)
        self.assertIn("The ranks agree", self.report(*ranks))
        ranks[1].record["calls"][-1]["bytes"] = 1
        self.assertIn("    rank 0: #0 send 'm' (64 bytes of Float, to rank 1)\n    rank 1: #0 receive 'm' (1 bytes of Float, from rank 0)\n",
                      self.report(*ranks))

    def test_calls_that_a_ring_has_lost(self):
        ranks = [Rank(r, 2).group("a", [0, 1]).group("b", [0, 1]) for r in range(2)]
        for rank in ranks:
            for number in range(20):
                rank.call("barrier", str(number))
        ranks[0].call("barrier", "last", state="awaited")
        ranks[1].record["calls"] = []
        text = self.report(*ranks)
        self.assertIn("1     20     its calls are no longer in the record\n", text)
        self.assertIn("rank 0 waits in #20 barrier 'last' of group a [0, 1]\n    for rank 1: 20 calls in it, none of them kept\n",
                      text)
        self.assertIn("  0, 1  0      has called nothing\n", text)

    def test_a_label_cannot_command_the_terminal(self):
        text = self.report(Rank(0, 1).group("g\x1b[2J", [0]).call("barrier", "x\x1b[31m\ny"))
        self.assertNotIn("\x1b", text)
        self.assertIn("#0 barrier 'x\\x1b[31m\\ny'", text)

    def test_the_chrome_trace(self):
        ranks = [Rank(r, 2).group("a", [0, 1]).group("b", [1, 0]).call("all_gather", "x", at=1).call("all_gather", "y", at=2)
                 .call("barrier", "z", group=1, at=3).call("barrier", "hang", state="awaited", at=10) for r in range(2)]
        self.write(*ranks)
        target = self.folder / "chrome.json"
        self.assertEqual(self.run_tool(self.folder, "--chrome", target).returncode, 0)
        events = json.loads(target.read_text())["traceEvents"]
        calls = [event for event in events if event["ph"] == "X"]
        self.assertEqual(len(calls), 8)
        rows = {(event["pid"], event["tid"]) for event in calls}
        self.assertEqual(len(rows), 4)
        for row in rows:
            spans = [(event["ts"], event["ts"] + event["dur"]) for event in calls if (event["pid"], event["tid"]) == row]
            self.assertTrue(all(first[1] <= second[0] for first, second in zip(spans, spans[1:])), spans)
        x, y, hang = (next(event for event in calls if event["name"] == name) for name in ("x", "y", "hang"))
        self.assertEqual((x["ts"], x["dur"]), (0, 2e6))
        self.assertEqual((y["ts"], y["dur"], y["args"]["issued_us"], y["args"]["waited_us"]), (2e6, 1e6, 1e6, 1e6))
        self.assertEqual((hang["ts"], hang["dur"], hang["args"]["state"]), (9e6, 90e6, "awaited"))
        names = {event["args"]["name"] for event in events if event["ph"] == "M"}
        self.assertEqual(names, {"rank 0 (host0)", "rank 1 (host0)", "group a [0, 1]", "group b [1, 0]"})
        result = self.run_tool(self.folder, "--chrome", self.folder / "no" / "file")
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertIn(f"{self.folder / 'no' / 'file'}: No such file", result.stderr)

    def test_folders_without_records(self):
        self.assert_error(f"{self.folder}: there is no rank-*.json in it")
        good = self.folder
        self.folder = good / "none"
        self.assert_error("none: No such file or directory")
        self.folder = good / "file"
        self.folder.write_text("")
        self.assert_error("file: Not a directory")
        self.folder = good
        (good / "rank-0.json").mkdir()
        self.assert_error("rank-0.json: Is a directory")

    def test_files_that_are_no_records(self):
        whole = json.dumps(Rank(1, 2).group("default", [0, 1]).call("all_reduce", "x").record)
        self.write(Rank(0, 2))
        path = self.folder / "rank-1.json"
        for end in (0, 1, 20, len(whole) // 2, len(whole) - 1):
            path.write_text(whole[:end])
            self.assert_error(f"{path}: is no whole JSON file: ")
        for content, part in ((b"\xff\xfe", "is no whole JSON file"), (b"[" * 100000, "is no whole JSON file"), (b"[]", "the file is no object"),
                              (b"{}", "is no trace of Tessera"), (b"null", "the file is no object")):
            path.write_bytes(content)
            self.assert_error(f"{path}: {part}")

    def test_fields_that_are_wrong(self):
        def change(record, place, value):
            *way, last = place
            for step in way:
                record = record[step]
            if value is None:
                del record[last]
            else:
                record[last] = value

        cases = [(["version"], 2, "is of version 2, and this program reads version 1"), (["version"], None, "is of version None"),
                 (["job"], "other", "is of another job"), (["world_size"], 3, "is of another job"),
                 (["world_size"], 1 << 40, "'world_size' of the file is 1099511627776"), (["rank"], 7, "'rank' of the file is 7"),
                 (["rank"], 0, "holds the record of rank 0"), (["rank"], True, "'rank' of the file is missing or no int"),
                 (["written_ns"], -1, "'written_ns' of the file is -1"), (["written_ns"], 10 ** 400, "'written_ns' of the file is 1000000"),
                 (["groups"], {}, "'groups' of the file is missing or no list"), (["groups", 0], 3, "group 0 is no object"),
                 (["groups", 0, "ranks"], [0], "'ranks' of group 0 are not ranks"), (["groups", 0, "ranks"], [1, "0"], "'ranks' of group 0"),
                 (["groups", 0, "issued"], 1.5, "'issued' of group 0 is missing or no int"), (["calls", 0, "group"], 1, "'group' of call 0 is 1"),
                 (["calls", 0, "what"], "gather", "'what' of call 0 is 'gather'"), (["calls", 0, "state"], None, "'state' of call 0 is missing"),
                 (["calls", 0, "issued_ns"], None, "'issued_ns' of call 0 is missing"), (["calls", 0, "peer"], 2, "'peer' of call 0 is 2"),
                 (["calls", 0, "dtype"], None, "'dtype' of call 0 is missing"), (["calls", 1, "peer"], None, "'peer' of call 1 is missing")]
        for place, value, part in cases:
            ranks = [Rank(r, 2).group("default", [0, 1]).call("all_reduce", "x").call("broadcast", "x", peer=0) for r in range(2)]
            change(ranks[1].record, place, value)
            self.write(*ranks[:1])
            (self.folder / "rank-1.json").write_text(json.dumps(ranks[1].record))
            self.assert_error(f"{self.folder}/rank-1.json: {part}" if "another job" not in part else "rank-1.json", part)

    def test_files_of_two_jobs_name_the_older_one(self):
        self.write(Rank(0, 2, job="old", written_ns=START), Rank(1, 2, job="new"))
        self.assert_error(f"{self.folder}/rank-0.json: is of another job (old) than {self.folder}/rank-1.json (new), which was written 100.0 s "
                          "later: remove the files of one of them")


if __name__ == "__main__":
    unittest.main()
