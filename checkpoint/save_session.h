#pragma once

// Internal: the steps that every save has, whatever format it writes.

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/plan.h>
#include <tessera/checkpoint/ranks.h>
#include <tessera/checkpoint/snapshot.h>
#include <tessera/checkpoint/staging.h>

namespace tessera::checkpoint {

/// A save in progress: a staging folder that all ranks write to. Every rank makes it and calls its functions in the same order.
/// When it is destroyed without a commit, the folder is removed.
class SaveSession {
 public:
  /// Rank 0 makes the folder; all ranks learn its name.
  SaveSession(const Ranks& ranks, const std::filesystem::path& target, const SaveOptions& options);

  const Ranks& ranks() const { return ranks_; }
  const std::filesystem::path& folder() const { return folder_; }

  /// `Ranks::all` with a step that names the target: "write <target>".
  std::vector<std::string> all(const std::string& verb, const std::function<std::string()>& work) const;
  /// Microseconds since 1970, later than those of the checkpoint that `latest` points at, though the clock was set back. Rank
  /// 0's.
  int64_t time() const;
  /// Rank 0 runs `finish`, then gives the folder its name and tidies up beside it.
  void commit(const std::function<void()>& finish);

 private:
  const Ranks& ranks_;
  std::string target_;
  SaveOptions options_;
  std::optional<Staging> staging_; ///< rank 0's
  std::filesystem::path folder_;
};

/// Saves in our format.
void save_snapshot(const Ranks& ranks, const Snapshot& snapshot, Planner& planner, const std::filesystem::path& target,
                   const SaveOptions& options);

} // namespace tessera::checkpoint
