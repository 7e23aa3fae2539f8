#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <tessera/collectives/backends/hierarchical/call.h>
#include <tessera/collectives/communicator.h>

#include <cstdint>
#include <memory>

namespace tessera::internal::hierarchical {

/// Memory for what is on its way between the two kinds of links. Of one communicator, whose calls take their steps one after
/// another. A call that failed keeps what it had, because gloo may still write there.
class Staging {
 public:
  explicit Staging(std::shared_ptr<shared_memory::Arena> arena) : arena_(std::move(arena)) {}

  /// Returns at least `bytes` of memory; the same as before where that is enough.
  const std::shared_ptr<c10::DataPtr>& memory(int64_t bytes);

 private:
  std::shared_ptr<shared_memory::Arena> arena_;
  std::shared_ptr<c10::DataPtr> memory_;
  int64_t bytes_ = 0;
};

/// What a reduction is of.
struct Reduction {
  c10::ScalarType dtype;
  ReduceOp op;
};

// The steps of each collective, for `Call::run`. Data go from host to host in chunks, and while one is on the wire another moves
// inside the hosts. Each rank exchanges with those of its column, so that all ranks of a host drive a part of its link. Sizes are
// in bytes, of one rank's part for the first two.

void all_gather(Call& call, char* output, char* input, int64_t bytes);
void reduce_scatter(Call& call, Staging& staging, char* output, char* input, int64_t bytes, Reduction reduction);
void all_reduce(Call& call, Staging& staging, char* data, int64_t bytes, Reduction reduction);
void broadcast(Call& call, char* data, int64_t bytes, int root);

} // namespace tessera::internal::hierarchical
