#pragma once

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string_view>
#include <vector>

namespace tessera::testing {

/// Whether TESSERA_TEST_FULL=1 asks for all of every sweep.
inline bool full_run() {
  const char* full = std::getenv("TESSERA_TEST_FULL");
  return full != nullptr && std::string_view(full) == "1";
}

/// TESSERA_TEST_SEED (default 1): the same on every rank, as ranks share the environment.
inline unsigned long test_seed() {
  const char* seed = std::getenv("TESSERA_TEST_SEED");
  return seed != nullptr ? std::strtoul(seed, nullptr, 10) : 1;
}

/// The cases that this run takes of a long sweep: all of them with TESSERA_TEST_FULL=1, otherwise `count` of them, in their
/// order, drawn with `test_seed`.
template <typename Case>
std::vector<Case> sweep(const std::vector<Case>& cases, size_t count) {
  if (full_run()) return cases;
  std::mt19937 generator(test_seed());
  std::vector<Case> subset;
  std::sample(cases.begin(), cases.end(), std::back_inserter(subset), count, generator);
  return subset;
}

} // namespace tessera::testing
