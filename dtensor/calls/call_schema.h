#pragma once

// Internal: what dispatch reads from the schema of an operator.

#include <ATen/core/dispatch/Dispatcher.h>
#include <absl/container/flat_hash_map.h>
#include <absl/container/inlined_vector.h>

#include <memory>
#include <mutex>

#include <tessera/base/per_thread.h>

namespace tessera::internal::dispatch {

enum class ArgKind : uint8_t {
  kTensor,     ///< Tensor or Tensor?
  kTensorList, ///< Tensor[] or Tensor?[]
  kNumber,     ///< Scalar, float or a list of them: placements depend on its value under few rules
  kStatic,     ///< placements may depend on its value
  kDynamic,    ///< they do not (seeds)
};

struct CallSchema {
  struct Argument {
    ArgKind kind;
    bool written = false;
    bool out = false; ///< out= argument: written only
  };
  struct Return {
    int written_argument = -1; ///< the argument that this return is
    bool view = false;         ///< shares memory with an argument that is not written
  };
  absl::InlinedVector<Argument, 8> arguments;
  absl::InlinedVector<size_t, 4> tensors; ///< the positions of the arguments that are tensors or lists of them
  absl::InlinedVector<Return, 2> returns;
  bool writes = false;
  bool writes_places = false; ///< in place, at those that an index or a mask names: index_fill_, masked_fill_, scatter_, …
  bool views = false;
  bool returns_list = false; ///< of tensors, one for each in a list that it is given, or parts of one
};

CallSchema read_schema(const c10::FunctionSchema& schema);

/// `read(op)`, made once and kept for the life of the process. Schemas live as long as their operator; a second level for each
/// thread, without a lock, keeps the hot path short.
template <auto read>
const auto& read_once(const c10::OperatorHandle& op) {
  using Value = decltype(read(op));
  static constinit PerThread<absl::flat_hash_map<const c10::FunctionSchema*, const Value*>> known;
  auto& entry = (*known)[&op.schema()];
  if (!entry) {
    static std::mutex mutex;
    static auto* all = new absl::flat_hash_map<const c10::FunctionSchema*, std::unique_ptr<const Value>>;
    const std::lock_guard lock(mutex);
    auto& shared = (*all)[&op.schema()];
    if (!shared) shared = std::make_unique<const Value>(read(op));
    entry = shared.get();
  }
  return *entry;
}

} // namespace tessera::internal::dispatch
