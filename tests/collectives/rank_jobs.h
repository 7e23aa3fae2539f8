#pragma once

// Jobs of rank_program on this machine.

#include "../support/subprocess.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>

namespace tessera::testing {

inline constexpr std::chrono::seconds kLongTimeout(60); // TESSERA_TIMEOUT_SECONDS of the jobs: no test may get near it

/// As if the ranks were on hosts with these numbers.
inline std::map<std::string, std::string> on_hosts(const std::string& numbers, const std::string& timeout = "60") {
  return {{"RANK_PROGRAM_HOSTS", numbers}, {"GLOO_SOCKET_IFNAME", "lo"}, {"TESSERA_TIMEOUT_SECONDS", timeout}};
}

inline ProgramResult run(const std::string& scenario, int ranks, std::map<std::string, std::string> environment = {}) {
  environment.emplace("TESSERA_TIMEOUT_SECONDS", std::to_string(kLongTimeout.count()));
  auto result = run_program({program_folder() + "/rank_program", scenario, "--ranks", std::to_string(ranks)}, environment,
                            std::chrono::seconds(120));
  EXPECT_THAT(result.left_behind, ::testing::IsEmpty()) << result.output;
  EXPECT_LT(result.duration, kLongTimeout / 2) << result.output;
  return result;
}

} // namespace tessera::testing
