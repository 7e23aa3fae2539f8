#pragma once

#include <absl/container/inlined_vector.h>
#include <c10/core/ScalarType.h>
#include <tessera/collectives/communicator.h>

#include <cstdint>

namespace tessera::internal::shared_memory {

/// Bytes in memory that somebody else keeps alive.
struct Part {
  char* data = nullptr;
  int64_t count = 0;
};
using Parts = absl::InlinedVector<Part, 8>;

/// What a collective moves, as one member sees it.
struct Motion {
  enum class Kind {
    kNothing,       ///< a barrier
    kCopies,        ///< whole inputs, or a part of each for every member
    kReduceScatter, ///< `output` is the reduction of one part of every input, of equal size for each member
    kAllReduce      ///< `output` is the reduction of all inputs, in place
  };
  Kind kind = Kind::kNothing;
  Part input;                ///< all that this member contributes
  int64_t largest_input = 0; ///< of any member
  int64_t location = -1;     ///< of `input`, as `Lane::location` has it
  bool varies = false;       ///< `largest_input` follows from the counts that the members publish, and the parts differ in size
  Parts send;                ///< for each member. Empty: kCopies sends the whole input to each, kReduceScatter equal parts of it
  Parts receive;             ///< kCopies: from each member
  Part output;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  ReduceOp op = ReduceOp::kSum;
};

} // namespace tessera::internal::shared_memory
