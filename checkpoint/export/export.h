#pragma once

// Internal: what every export of whole tensors begins with.

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tessera/checkpoint/export/export_names.h>
#include <tessera/checkpoint/save/save_session.h>
#include <tessera/checkpoint/save/writer.h>

namespace tessera::internal {

/// The options that all exports have.
struct ExportOptions {
  template <typename Options>
  explicit ExportOptions(const Options& options)
      : filter(options.filter), overwrite(options.overwrite), differing_tensors(options.differing_tensors), mesh(options.mesh) {}

  NameFilter filter;
  bool overwrite;
  std::optional<checkpoint::DifferingTensors> differing_tensors;
  std::optional<DeviceMesh> mesh;
};

/// An export that has begun: what is written, and where. Every rank makes it, with the same options.
class Export {
 public:
  /// `format` is for errors. `check` sees what the filter left on this rank, and returns what it tells the other ranks.
  Export(const StateDict& state, const std::filesystem::path& target, const ExportOptions& options, const Staged& staged,
         const std::string& format, const std::function<std::string(const Snapshot&)>& check);

  SaveSession& session() { return session_; }
  const SavePlan& plan() const { return *plan_; }
  std::vector<OwnedPart> parts() const { return parts_of(*plan_, ranks_.rank(), snapshot_); }

 private:
  const Ranks ranks_;
  Snapshot snapshot_;
  SaveSession session_;
  Planner planner_;
  const SavePlan* plan_; ///< the planner's
};

} // namespace tessera::internal
