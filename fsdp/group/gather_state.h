#pragma once

// Internal: the states of a group's parameters between its shard and the whole.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>

#include <tessera/collectives/work.h>
#include <tessera/fsdp/buffers/side_stream.h>

namespace tessera::internal {

struct Sharded {
  bool has_told_first = false; ///< the ranks of a gather's first stage know that this one cannot gather
};

/// A gather that has been started.
struct Gathering {
  size_t stage = 0;             ///< whose collective was started last
  at::Tensor output = {};       ///< of the innermost stage, until it is done with
  Work work = {};               ///< of the first one
  bool completes_later = false; ///< by whoever reads it first: its wait blocks the host
};

struct Unsharded {};

/// Each state follows the one before it, and the first one the last. A group whose leaves alias its shard is unsharded for good.
using GatherState = std::variant<Sharded, Gathering, Unsharded>;

/// What a stage of gathers starts from, where that was kept: this rank's part of the unsharded parameters among fewer ranks than
/// the shard axis has (ZeRO++: the secondary partition).
struct KeptPart {
  at::Tensor value = {};
  BlockUsers users = {}; ///< of one that is kept after a forward; any other is written and read on the stream of gathers alone
  std::optional<uint64_t> version = {}; ///< of the shard that it was gathered from

  bool is_of(uint64_t shard_version) const { return version == shard_version; }
  int64_t bytes() const { return value.defined() ? static_cast<int64_t>(value.nbytes()) : 0; }
  void release() {
    users.end();
    value = at::Tensor();
  }
};

} // namespace tessera::internal
