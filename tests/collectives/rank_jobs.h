#pragma once

// Jobs of rank_program on this machine.

#include "../support/subprocess.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>
#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

/// As if the ranks were on hosts with these numbers.
inline std::map<std::string, std::string> on_hosts(const std::string& numbers, const std::string& timeout = kNeverSeconds) {
  return {{"RANK_PROGRAM_HOSTS", numbers}, {"GLOO_SOCKET_IFNAME", "lo"}, {"TESSERA_TIMEOUT_SECONDS", timeout}};
}

/// Runs the program with these arguments, by default in forks of a process that has loaded it.
inline ProgramResult run_rank_program(std::vector<std::string> arguments,
                                      const std::map<std::string, std::string>& environment = {},
                                      std::chrono::seconds timeout = std::chrono::seconds(60), Start start = Start::kForked) {
  arguments.insert(arguments.begin(), program_folder() + "/rank_program");
  return run_program(arguments, environment, timeout, start);
}

/// Runs the job to its end, which comes before its timeout where the test gives none.
inline ProgramResult run(const std::string& scenario, int ranks, std::map<std::string, std::string> environment = {},
                         Start start = Start::kForked) {
  environment.emplace("TESSERA_TIMEOUT_SECONDS", kNeverSeconds);
  auto result = run_rank_program({scenario, "--ranks", std::to_string(ranks)}, environment, std::chrono::seconds(120), start);
  EXPECT_THAT(result.left_behind, ::testing::IsEmpty()) << result.output;
  EXPECT_FALSE(result.timed_out) << result.output;
  return result;
}

/// How often a text holds a part.
inline int count_of(const std::string& part, const std::string& text) {
  int count = 0;
  for (auto found = text.find(part); found != std::string::npos; found = text.find(part, found + 1)) ++count;
  return count;
}

/// A port below those that the system gives to whoever asks for any: nobody takes it between here and rank 0's store.
inline std::string free_port() {
  static int calls = 0;
  return std::to_string(20000 + (4 * getpid() + calls++) % 12000);
}

} // namespace tessera::testing
