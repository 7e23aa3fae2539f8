#pragma once

#include <ATen/record_function.h>

namespace tessera::internal {

/// While it lives, `count` is told of each call of an operator on any thread.
class FlopWatch {
 public:
  explicit FlopWatch(at::RecordFunctionCallback::StartCallback count)
      : handle_(at::addGlobalCallback(at::RecordFunctionCallback(count).needsInputs(true).scopes({at::RecordScope::FUNCTION}))) {}
  ~FlopWatch() { at::removeCallback(handle_); }
  FlopWatch(const FlopWatch&) = delete;
  FlopWatch& operator=(const FlopWatch&) = delete;

 private:
  at::CallbackHandle handle_;
};

} // namespace tessera::internal
