#pragma once

// Internal: what a rank has in place of the parameters and buffers of other ranks' stages.

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include <tessera/base/per_thread.h>

namespace tessera::internal::pipeline {

/// `tensor` becomes one without memory, on the meta device, in place. Each operator that reads it is an error that names it, and
/// its `owner`.
void make_foreign(const at::Tensor& tensor, std::string name, std::string owner);
/// Does the same, where `error` says what is wrong with reading it.
void make_foreign(const at::Tensor& tensor, std::function<std::string()> error);

/// While it lives, this thread computes a stage, of which errors tell.
class StageScope {
 public:
  explicit StageScope(const std::string& stage);

 private:
  const ScopedValue<const std::string*> stage_;
};

/// The stage that this thread computes; "no stage".
std::string current_stage();

/// What is wrong with reading the parameter `name` of `owner` in `reader`, and what to do about it.
std::string foreign_read(const std::string& name, const std::string& owner, const std::string& reader);

} // namespace tessera::internal::pipeline
