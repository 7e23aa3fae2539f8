#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace tessera::benchmarks {

/// How a process ended.
struct Ended {
  enum class How { kExit, kSignal, kTimeLimit } how = How::kExit;
  int code = 0;       ///< its exit status, or the signal
  std::string errors; ///< what it and those that it started wrote to their standard error
};

/// Runs this program again with `arguments`, of which the first is its name, and `variables` more in its environment, and waits
/// for it. It goes with this process, and after `seconds` it is killed with all that it started. What it writes goes to files in
/// `folder`.
Ended run_again(const std::vector<std::string>& arguments, const std::vector<std::pair<std::string, std::string>>& variables,
                double seconds, const std::filesystem::path& folder);

/// In a process that `run_again` has started: ends it with the one that did, also where that has ended already.
void end_with_parent();

/// Empty where it is not there.
std::string content_of(const std::filesystem::path& file);

} // namespace tessera::benchmarks
