#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <tessera/collectives/counters.h>
#include <tessera/dtensor/placement.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

namespace internal {
struct RedistributionLog;
}

/// Counts this process's collectives from its construction on (DTensor: CommDebugMode). Every communicator and thread counts.
class CountCollectives {
 public:
  CountCollectives();
  /// Calls and bytes of one kind since then.
  CollectiveCounters::Count count(CollectiveKind kind) const;
  int64_t total_calls() const;
  int64_t total_bytes() const;
  /// "2 all_gather (96 bytes), 1 all_reduce (4 bytes)"; "no collectives".
  std::string to_string() const;

 private:
  std::array<CollectiveCounters::Count, kCollectiveKinds> start_;
};

/// One tensor that moved from one placement to another.
struct RedistributionRecord {
  std::string op; ///< the operator, or the function, that asked for it
  std::vector<int64_t> sizes;
  Placements from, to;
  int64_t bytes = 0; ///< payload of the collectives on this rank
  /// "aten::mm: [8, 4] (Shard(0)) -> (Replicate()), 128 bytes".
  std::string to_string() const;
};

/// While it lives, every redistribution that changes a local tensor is recorded: those of this thread, and of the backwards that
/// it calls. Scopes nest: the innermost records.
class LogRedistributions {
 public:
  LogRedistributions();
  ~LogRedistributions();
  LogRedistributions(const LogRedistributions&) = delete;
  LogRedistributions& operator=(const LogRedistributions&) = delete;

  const std::vector<RedistributionRecord>& records() const;
  /// One line a record.
  std::string to_string() const;

 private:
  std::unique_ptr<internal::RedistributionLog> log_;
  c10::DebugInfoGuard scope_;
};

/// Which rank holds which part, as text: one line a rank of the mesh, in its order. The same on every rank; no communication.
///
///   float[5, 3] (Shard(0)) on DeviceMesh(cpu, [0, 1])
///   rank 0: [0:3, 0:3]
///   rank 1: [3:5, 0:3]
///
/// Under Partial a line says so: "[0:5, 0:3] partial sum". Under RaggedShard the first range counts positions of the merged dims,
/// from where the part starts; where mesh dims before it split these, the part may hold later ones than this range has;
/// under StridedShard a dim may have several: "0:1+2:3".
std::string picture(const at::Tensor& dtensor);

} // namespace tessera
