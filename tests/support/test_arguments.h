#pragma once

#include <string>
#include <vector>

namespace tessera::testing {

/// One job that a test program starts: so many local ranks, and where each of them pretends to be.
struct TestWorld {
  int ranks = 0;     ///< 0: this process, as a job of one rank
  std::string hosts; ///< one digit a rank, that of its host; empty: all on this one

  std::string name() const; ///< "3 ranks", "4 ranks on hosts 0011"
};

/// What a test program is told beside GoogleTest's flags.
struct TestArguments {
  std::vector<TestWorld> worlds;  ///< one after the other; at least one
  std::vector<std::string> files; ///< run these test files and rooms alone; none: all
};

/// Takes `--ranks 1,2,4`, `--hosts 0011,0110` and `--files fully_shard_test,schedule` out of the arguments. Throws an error that
/// names what is wrong with them.
TestArguments take_test_arguments(int& argc, char** argv);

} // namespace tessera::testing
