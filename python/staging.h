#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

namespace tessera::python {

using Tensors = std::vector<at::Tensor>;

/// Between the tensors of a c10d call, which may have any strides or be lists, and the flat ones that a communicator takes:
/// copies where they differ, before the call and after it.
class Staging {
 public:
  /// A flat tensor with the values of `tensor`, which may be itself.
  static at::Tensor input(const at::Tensor& tensor);
  /// One with those of all, one after another.
  static at::Tensor input(const Tensors& tensors);
  /// A copy where `tensor` shares memory with `other`: an all-to-all takes none that overlap.
  static at::Tensor input_apart(const at::Tensor& tensor, const at::Tensor& other);

  /// A flat tensor for the values that `tensor` shall have afterwards.
  at::Tensor output(const at::Tensor& tensor);
  at::Tensor output(const Tensors& tensors);
  /// One that shares no memory with `other`.
  at::Tensor output_apart(const at::Tensor& tensor, const at::Tensor& other);
  /// One that has its values before as well.
  at::Tensor in_out(const at::Tensor& tensor);

  /// Runs before the copies to the outputs.
  void then(std::function<void()> step) { steps_.push_back(std::move(step)); }
  void copy_back(const at::Tensor& to, const at::Tensor& from) { copies_.emplace_back(to, from); }
  /// What remains to be done after the call: empty where nothing does.
  std::function<void()> finish() &&;

 private:
  at::Tensor copied_back(const at::Tensor& tensor);

  std::vector<std::function<void()>> steps_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

} // namespace tessera::python
