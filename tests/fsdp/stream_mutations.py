#!/usr/bin/env python3
"""Takes each wait, event and hold of a buffer out of fully_shard's streams in turn, and runs their tests on the simulated device.

A mutation that no test finds is an error: either a test is missing, or the line was not needed. The sources are changed in place,
and as they were again at the end; a file with changes that are not committed is an error.

Usage: tests/fsdp/stream_mutations.py [--preset PRESET] [--ranks N]... [--only TEXT] [--from NUMBER]
       tests/fsdp/stream_mutations.py --check-lines
"""
import argparse
import itertools
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# programs, and the files of each run: a test of offload_test leaves its group unusable for the files after it
TESTS = [("fsdp_tests", "launches_test,program_streams_test,simulated_device_test,streams_test,offload_to_host_test"),
         ("fsdp_tests", "offload_test"), ("collectives_tests", "staged_test")]
LIMIT = 600  # seconds of a run
# file, the line or lines, what takes their place
MUTATIONS = [
    ("fsdp/buffers/side_stream.cpp", "  event.block(*stream_);\n", ""),
    ("fsdp/buffers/side_stream.cpp", "  Work(last_).wait();\n", ""),
    ("fsdp/buffers/side_stream.cpp", "  if (!contains(users_, current)) users_.push_back(current);\n", ""),
    ("fsdp/buffers/side_stream.cpp", "    mark(stream_).wait();\n", ""),
    ("fsdp/buffers/side_stream.cpp", "      work_.wait();\n", "      work_ = Work();\n"),
    ("fsdp/buffers/side_stream.cpp", "  std::exchange(last_, Work()).wait();\n", "  last_ = Work();\n"),
    ("fsdp/buffers/side_stream.cpp", "    if (user != home) mark(user).wait();\n", "    static_cast<void>(user);\n"),
    ("fsdp/buffers/side_stream.h", "      work.wait();\n", ""),
    ("fsdp/buffers/side_stream.h", "      mark(*stream_).wait();\n", ""),
    ("fsdp/group/gather.cpp", "  users_.wait_for(gathering.work);\n", ""),
    ("fsdp/group/gather.cpp", "    gathering.work.wait();\n", ""),
    ("fsdp/group/gather.cpp", "  users_.join();\n  if (gathering)", "  if (gathering)"),
    ("fsdp/group/gather.cpp", "    users_.end();\n    for (auto& part", "    for (auto& part"),
    ("fsdp/group/gather.cpp", "    for (auto& part : kept_) part.users.end();\n", ""),
    ("fsdp/group/gather.cpp", "  users_.end();\n  storage_->release();\n", "  storage_->release();\n"),
    ("fsdp/group/gather.cpp", "  const c10::OptionalStreamGuard home(users_.end());\n", ""),
    ("fsdp/gradients/staged_reduction.cpp", "  input.users.wait_for(running.first);\n", ""),
    ("fsdp/gradients/staged_reduction.cpp", "    Work(running.first).wait();\n", ""),
    ("fsdp/gradients/staged_reduction.cpp", "    wait_on_home();\n  } catch (...) { // of a broken", "  } catch (...) { // of a broken"),
    ("fsdp/gradients/staged_reduction.cpp", "  wait_for(group_, running.rest_work);\n", ""),
    ("fsdp/reads/sharded_kind.cpp", "  group.wait_to_write(lock);\n", ""),
    ("fsdp/buffers/side_stream.cpp", "  mark(before).wait();\n", ""),
    ("fsdp/buffers/side_stream.cpp", "    Work(end).wait();\n", ""),
    ("fsdp/schedule/schedule.cpp", "  const StreamScope scope(compute_stream_);\n  if (scope.has_switched()) use_on_current_stream(gradient);\n", ""),
    ("fsdp/schedule/schedule.cpp", "  const StreamScope scope(compute_stream_);\n  const auto finish", "  const auto finish"),
    ("fsdp/gradients/reduce_buffer.cpp", "  users.end();\n", ""),
    ("fsdp/gradients/staged_reduction.cpp", "  try {\n    wait_on_home();\n  } catch (...) { // of a device that has failed\n  }\n", ""),
    ("fsdp/group/group_shard.h", "    fetch_.last = resources.streams.gather.run([&] {\n", "    fetch_.last = [&](const auto& issue) { return issue(); }([&] {\n"),
    ("fsdp/group/group_shard.h", "    if (!std::exchange(fetch_.last, Work()).is_completed()) streams.gather.synchronize();\n", ""),
    ("fsdp/schedule/schedule.cpp", "    deliveries_.wait_for_copies();\n", "    for (auto& each : deliveries_.ready()) each.copy = nullptr;\n"),
    ("offload/host_memory.cpp", "    if (!end_.query()) end_.synchronize();\n", ""),
    ("offload/device_file_memory.cpp", "        copied.synchronize();\n", ""),
    ("offload/device_file_memory.cpp", "    reading_->wait();\n", ""),
    ("fsdp/gradients/reduce_buffer.cpp", " && stream == current_stream_if_any(values.device());", ";"),
    ("checkpoint/boxes/pieces.cpp", "  tensor.copy_(tensor);", ""),
    ("fsdp/group/gather.cpp", "      work.wait();\n", ""),
    ("fsdp/group/gather_stages.cpp", "    kept.users.join();\n", ""),
    ("fsdp/group/gather.cpp", "    part->users.wait_for_home();\n", ""),
    ("fsdp/group/gather_state.h", "    users.end();\n", ""),
    ("fsdp/schedule/schedule.cpp", "  if (scope.has_switched()) use_on_current_stream(gradient);\n", ""),
    ("fsdp/schedule/schedule.cpp", "  compute_stream_ = current_stream_if_any(device_);\n", ""),
    ("dtensor/redistribute/differentiable_move.cpp", "  state.computed.wait();\n", ""),
    ("fsdp/group/gather.cpp", "kept_[next].value).wait();\n", "kept_[next].value);\n"),
    ("fsdp/group/gather.cpp", "    users_.join(); // the shard,", "    // the shard,"),
    ("fsdp/group/parameter_group.cpp", "  wait_for_readers(); // on the streams", "  // on the streams"),
    ("fsdp/gradients/staged_reduction.cpp", "  use_on_current_stream(running.sum);\n  for (const auto& tensor : running.inputs) use_on_current_stream(tensor);\n", ""),
    ("fsdp/gradients/staged_reduction.cpp", "  if (home && *home != current_stream(home->device())) use_on_current_stream(parked.value);\n",
     "  static_cast<void>(home);\n"),
    ("fsdp/gradients/staged_reduction.cpp", "    if (const auto home = input.users.end(); home && home != running.home) use_on_current_stream(running.sum);\n", ""),
]


def check_lines(mutations):
    """Ends before an hour of tests where the sources have moved on."""
    counts = [(path, line, (ROOT / path).read_text().count(line)) for path, line, _ in mutations]
    if wrong := [f"{path} holds {count} times: {line!r}" for path, line, count in counts if count != 1]:
        sys.exit("\n".join(wrong))


def build(preset):
    command = ["ninja", "-C", ROOT / "build" / preset, *{program for program, _ in TESTS}]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(result.stdout[-4000:])


def failing_ranks(preset, ranks):
    """The world size on which the tests fail, and how; none where all pass."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TESSERA_TIMEOUT_SECONDS": "30", "TESSERA_TEST_DEVICE": "sim"}
    for (program, files), count in itertools.product(TESTS, ranks):
        command = [ROOT / "build" / preset / "bin/tests" / program, "--files", files, "--ranks", str(count), "--gtest_brief=1",
                   "--gtest_fail_fast"]
        try:
            result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return f"{count} ranks, after {LIMIT} s"
        if result.returncode != 0:
            return f"{count} ranks"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="release")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--only", default="", help="those whose file or line holds this")
    parser.add_argument("--from", dest="first", type=int, default=1, help="the number of the first, from 1")
    parser.add_argument("--check-lines", action="store_true", help="only look whether the sources still hold each line, once")
    arguments = parser.parse_args()
    ranks = arguments.ranks or [2, 4]
    mutations = [mutation for mutation in MUTATIONS if arguments.only in mutation[0] + mutation[1]]
    mutations = mutations[arguments.first - 1 :]
    check_lines(mutations)
    if arguments.check_lines:
        return
    changed = subprocess.run(["git", "diff", "--name-only", "HEAD", "--", *{path for path, _, _ in mutations}], cwd=ROOT,
                             capture_output=True, text=True).stdout
    if changed:
        sys.exit(f"these have changes that are not committed:\n{changed}")
    build(arguments.preset)
    if (failing := failing_ranks(arguments.preset, ranks)) is not None:
        sys.exit(f"the tests fail on {failing} without a mutation")
    unseen = 0
    for path, line, instead in mutations:
        file = ROOT / path
        original = file.read_text()
        try:
            file.write_text(original.replace(line, instead))
            build(arguments.preset)
            failing = failing_ranks(arguments.preset, ranks)
        finally:
            file.write_text(original)
        unseen += failing is None
        found = "NOT FOUND" if failing is None else f"found on {failing}"
        print(f"{found:16} {path}: {' '.join(line.split())}", flush=True)
    build(arguments.preset)
    print(f"{len(mutations) - unseen} of {len(mutations)} mutations are found")
    sys.exit(unseen > 0)


if __name__ == "__main__":
    main()
