#pragma once

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <numeric>
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

/// A stream of `test_seed`, a name and a number.
std::mt19937 drawn_generator(std::string_view name, unsigned number);

/// What the next sweep draws with: another stream for each call, of `test_seed`, the current test's full name (outside of tests
/// the program's) and the number of the test's calls before it. It is the same on every rank if all call it in the same order.
std::mt19937 next_sweep_generator();

/// The cases that this run takes of a long sweep: all of them with TESSERA_TEST_FULL=1, otherwise `count` of them, in their
/// order: those that are `always` taken, which may be more, and others that are drawn with `next_sweep_generator`.
template <typename Case, typename Always>
std::vector<Case> sweep(const std::vector<Case>& cases, size_t count, const Always& always) {
  if (full_run()) return cases;
  std::vector<size_t> chosen(cases.size());
  std::iota(chosen.begin(), chosen.end(), size_t{0});
  const auto drawn = std::stable_partition(chosen.begin(), chosen.end(), [&](size_t i) { return always(cases[i]); });
  const std::vector<size_t> others(drawn, chosen.end());
  chosen.erase(drawn, chosen.end());
  auto generator = next_sweep_generator();
  std::sample(others.begin(), others.end(), std::back_inserter(chosen), count - std::min(count, chosen.size()), generator);
  std::sort(chosen.begin(), chosen.end());
  std::vector<Case> subset;
  for (const auto i : chosen) subset.push_back(cases[i]);
  return subset;
}

template <typename Case>
std::vector<Case> sweep(const std::vector<Case>& cases, size_t count) {
  return sweep(cases, count, [](const Case&) { return false; });
}

} // namespace tessera::testing
