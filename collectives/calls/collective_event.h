#pragma once

// Internal: collectives in LibTorch's profiler.

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <tessera/base/per_thread.h>

namespace tessera::internal {

/// An event in LibTorch's profiler, "tessera:all_reduce", from the call of a collective until a thread sees its end.
class CollectiveEvent {
 public:
  using Ptr = std::shared_ptr<CollectiveEvent>;

  /// Who observes this thread's calls: nobody inside of `Parts`. Costs a look, in which those draw that observe a share of the
  /// calls.
  static std::optional<at::StepCallbacks> observers();
  /// The tensors are those whose shapes the profiler shows.
  CollectiveEvent(at::StepCallbacks&& observers, const char* collective, c10::ArrayRef<at::Tensor> inputs);
  /// Null where nobody observes.
  static Ptr begin(const char* collective, c10::ArrayRef<at::Tensor> inputs);
  /// Whoever calls it first, on any thread, ends the event. Otherwise its destructor does.
  void end();
  ~CollectiveEvent() { end(); }
  CollectiveEvent(const CollectiveEvent&) = delete;
  CollectiveEvent& operator=(const CollectiveEvent&) = delete;

  /// While it lives, collectives of this thread are parts of another one, and have no events of their own. It must also live
  /// where nobody observes the other one: an observer that has drawn to pass it over would draw anew at each part.
  class Parts {
   public:
    Parts();

   private:
    const ScopedValue<bool> in_parts_;
  };

 private:
  const std::string name_; ///< outlives the range, which refers to it
  at::RecordFunction range_;
  /// What a profiler that observes one thread finds its state by, at the range's end too. That state may end before the call, and
  /// the profiler's event with it: nothing here keeps it alive.
  const std::weak_ptr<c10::ThreadLocalDebugInfo> profile_;
  std::once_flag ended_;
};

} // namespace tessera::internal
