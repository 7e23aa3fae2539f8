#pragma once

// Internal: what the ranks of a training decide together.

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// The ranks of a trainer, and what one of them could not do. All functions but `note` and `run` are called by every rank.
class Agreement {
 public:
  /// `data_mesh` are the ranks through this one that have different data. Local but for the communicator.
  Agreement(const DeviceMesh& mesh, const DeviceMesh& data_mesh);

  int64_t size() const { return mesh_.size(); }
  int64_t data_ranks() const { return data_mesh_.size(); }
  /// How many ranks have the same data: those of the other dims.
  int64_t copies() const { return size() / data_ranks(); }
  /// Whether this rank is the first of those that have its data.
  bool is_first_copy() const { return is_first_copy_; }
  bool is_first() const;
  const DeviceMesh& mesh() const { return mesh_; }
  const DeviceMesh& data_mesh() const { return data_mesh_; }

  /// Replaces `sums` by the sums over all ranks, and `maxima` by the largest: one launch. The same lengths on every rank.
  void reduce(std::vector<double>& sums, std::vector<double>& maxima, const char* label) const;
  /// What each rank says, in the order of `mesh().ranks()`.
  std::vector<std::string> texts(const std::string& own) const;

  /// Keeps an error of this rank, `what` of it, until the ranks agree on it; the first one counts.
  void note(const std::string& what, const std::exception_ptr& error);
  void note(const std::string& text);
  /// Runs `work`, and notes what it throws.
  template <typename Work>
  void run(const std::string& what, const Work& work) {
    try {
      work();
    } catch (...) {
      note(what, std::current_exception());
    }
  }
  bool has_failed() const { return !failure_.empty(); }
  /// An error on every rank with what each has noted; called where some rank has.
  [[noreturn]] void throw_failures();
  /// Throws where some rank has noted an error: one small all-reduce.
  void check();

 private:
  DeviceMesh mesh_, data_mesh_;
  CommunicatorPtr communicator_; ///< null on one rank
  bool is_first_copy_;
  std::string failure_;
};

} // namespace tessera::internal
