#pragma once

#include <ATen/record_function.h>
#include <tessera/collectives/backends/simulated/flops.h>

#include <memory>

namespace tessera::internal {

/// While it lives, `count` is told of the operations of each call of an operator on any thread, but not of those that such a call
/// makes itself: they are the same ones (`mv` calls `addmv_`, and some devices' `_grouped_mm` calls `mm`). One at a time.
class FlopWatch {
 public:
  using Count = void (*)(double flops);
  explicit FlopWatch(Count count) {
    counter = count;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(begin, end).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  ~FlopWatch() { at::removeCallback(handle_); }
  FlopWatch(const FlopWatch&) = delete;
  FlopWatch& operator=(const FlopWatch&) = delete;

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    const double flops = counted ? 0 : flops_of(call.name(), call.inputs());
    if (flops == 0) return nullptr;
    counted = &call;
    counter(flops);
    return nullptr;
  }
  static void end(const at::RecordFunction& call, at::ObserverContext* /*context*/) {
    if (counted == &call) counted = nullptr;
  }

  static inline Count counter = nullptr;
  static inline thread_local const at::RecordFunction* counted = nullptr; // the counted call that runs on this thread
  at::CallbackHandle handle_;
};

} // namespace tessera::internal
