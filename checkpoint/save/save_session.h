#pragma once

// Internal: the steps that every save has, whatever format it writes.

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/save/plan.h>
#include <tessera/checkpoint/save/snapshot.h>
#include <tessera/checkpoint/save/staging.h>
#include <tessera/checkpoint/state/ranks.h>

namespace tessera::internal {

/// What the ranks tell each other when a save starts.
struct SaveStart {
  std::string place;             ///< rank 0's
  std::vector<std::string> said; ///< what `prepare` returned on each rank
};

/// Runs `prepare` (null: nothing) and then `make_place` on every rank. An error where `differing_tensors` of the options differs
/// between ranks, which would wait for each other, or write other files than the index lists. Every rank calls it.
using Prepare = std::function<std::string()>;
SaveStart start_save(const Ranks& ranks, const std::string& target, const checkpoint::SaveOptions& options,
                     const Prepare& prepare, const std::function<std::string()>& make_place);

/// A save in progress: a staging folder that all ranks write to. Every rank makes it and calls its functions in the same order.
/// When it is destroyed without a commit, the folder is removed.
class SaveSession {
 public:
  /// Every rank runs `prepare`. Then rank 0 makes the folder; all ranks learn its name. A relative target lies in rank 0's
  /// `base`; empty: in its current folder.
  SaveSession(const Ranks& ranks, const std::filesystem::path& target, const checkpoint::SaveOptions& options,
              const Prepare& prepare = nullptr, const Staged& staged = {}, const std::filesystem::path& base = {});

  const Ranks& ranks() const { return ranks_; }
  const std::filesystem::path& folder() const { return folder_; }
  /// What `prepare` returned on each rank.
  const std::vector<std::string>& said() const { return said_; }
  /// The file in that folder which gets the target's name where a file is staged.
  std::filesystem::path file() const { return folder_ / target_.filename(); }

  /// `Ranks::all` with a step that names the target: "write <target>".
  template <typename Work>
  auto all(const std::string& verb, const Work& work) const {
    return ranks_.all(verb + " " + target_.string(), work);
  }
  /// The same for work whose result, a text, must be the same on every rank.
  void all_agree(const std::string& verb, const std::function<std::string()>& work) const;
  /// Microseconds since 1970, later than those of the checkpoint that `latest` points at, though the clock was set back. Rank
  /// 0's.
  int64_t time() const;
  /// Rank 0 runs `finish`, then gives the folder its name and tidies up beside it.
  void commit(const std::function<void()>& finish);

 private:
  const Ranks& ranks_;
  std::filesystem::path target_;
  checkpoint::SaveOptions options_;
  std::optional<Staging> staging_; ///< rank 0's
  std::filesystem::path folder_;
  std::vector<std::string> said_;
};

/// The place of a checkpoint to be: a folder, or a name in a storage.
struct Destination {
  std::filesystem::path path;
  checkpoint::Storage* storage = nullptr;
  std::filesystem::path base = {}; ///< of a relative path, see SaveSession

  std::string name() const { return path.string(); }
};

/// Saves what `take` gives on each rank, in our format.
void save_snapshot(const Ranks& ranks, const std::function<Snapshot()>& take, Planner& planner, const Destination& to,
                   const checkpoint::SaveOptions& options);

} // namespace tessera::internal
