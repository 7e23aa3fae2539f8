#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace tessera::testing::scripts {

/// What the environment says about the scripts to run, for looking at a failure.
///
///   TESSERA_SCRIPT=417                       this script alone, and its actions are printed
///   TESSERA_SCRIPTS=500-999                  of each test's scripts on this number of ranks the 501st to the 1,000th
///   TESSERA_SCRIPT_STEPS=8                   no more than the first 8 of its steps
///   TESSERA_SCRIPT_WITHOUT="write,3,linear"  without these actions, writes, steps (by number) and kinds of blocks
///   TESSERA_SCRIPT_OFTEN="clip,explain"      every other action is one of these: other scripts, for a new action
///   TESSERA_SCRIPT_SHRINK=1                  leaves out what a failing script fails without, and prints what is left
struct Replay {
  static const Replay& from_environment();
  bool leaves_out(const std::string& name) const { return without.count(name) > 0; }

  std::optional<uint64_t> script;
  std::optional<std::pair<size_t, size_t>> range; ///< first and last
  int64_t steps = 1000;
  std::set<std::string> without;
  std::set<std::string> often;
  bool shrinks = false;
};

} // namespace tessera::testing::scripts
