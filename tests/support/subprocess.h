#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

struct ProgramResult {
  int status = 0;               ///< the exit status, or 128 + the signal that ended it
  std::string output;           ///< stdout and stderr
  bool timed_out = false;       ///< it had not ended, and was killed
  std::vector<int> left_behind; ///< pids of descendants that outlived it by more than 5 s; they have been killed
};

enum class Start {
  kExecuted,
  kForked,         ///< from a process that has loaded the program: most jobs take less time than that
  kForkedAsSession ///< the same, with a session and a group of processes of its own, as `setsid` gives
};

/// Runs a program to its end, with `environment` added to this one's. Kills it and all its descendants at the timeout (status
/// 137). Rank variables of this process are not passed on. What cannot be forked is executed (forked_programs.h).
ProgramResult run_program(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& environment = {},
                          std::chrono::seconds timeout = std::chrono::seconds(60), Start start = Start::kExecuted);

/// TESSERA_TIMEOUT_SECONDS of a job in which nobody may wait for the timeout: `run_program` kills it long before.
inline constexpr const char* kNeverSeconds = "3600";

/// The folder of this test program; helper programs are beside it.
std::string program_folder();

} // namespace tessera::testing
