#include "staging.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

namespace tessera::python {

namespace {

// Where the tensors already lie one after another, as `chunk` makes them, all of them as one; undefined where they do not.
at::Tensor as_one(const Tensors& tensors) {
  const auto& first = tensors.front();
  int64_t end = first.storage_offset();
  for (const auto& tensor : tensors) {
    const bool follows = tensor.is_contiguous() && tensor.dtype() == first.dtype() && tensor.is_alias_of(first) &&
                         tensor.storage_offset() == end && !tensor.is_conj() && !tensor.is_neg();
    if (!follows) return {};
    end += tensor.numel();
  }
  return first.as_strided({end - first.storage_offset()}, {1}, first.storage_offset());
}

void check_list(const Tensors& tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), "the list of tensors is empty");
  for (const auto& tensor : tensors)
    TORCH_CHECK_VALUE(tensor.scalar_type() == tensors[0].scalar_type(), "the tensors of the list are of ",
                      tensors[0].scalar_type(), " and ", tensor.scalar_type(), ", they must be equal");
}

} // namespace

at::Tensor Staging::input(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg().contiguous(); }

at::Tensor Staging::input(const Tensors& tensors) {
  check_list(tensors);
  if (auto whole = as_one(tensors); whole.defined()) return whole;
  Tensors flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape(-1));
  return input(at::cat(flat));
}

at::Tensor Staging::input_apart(const at::Tensor& tensor, const at::Tensor& other) {
  auto flat = input(tensor);
  return flat.is_alias_of(other) ? flat.clone() : flat;
}

at::Tensor Staging::copied_back(const at::Tensor& tensor) {
  auto flat = at::empty(tensor.sizes(), tensor.options());
  copy_back(tensor, flat);
  return flat;
}

at::Tensor Staging::output(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() ? tensor : copied_back(tensor);
}

at::Tensor Staging::output_apart(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.is_alias_of(other) ? copied_back(tensor) : output(tensor);
}

at::Tensor Staging::output(const Tensors& tensors) {
  check_list(tensors);
  if (auto whole = as_one(tensors); whole.defined()) return whole;
  int64_t total = 0;
  for (const auto& tensor : tensors) total += tensor.numel();
  auto flat = at::empty({total}, tensors[0].options());
  int64_t begin = 0;
  for (const auto& tensor : tensors) {
    copy_back(tensor, flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
  return flat;
}

at::Tensor Staging::in_out(const at::Tensor& tensor) {
  auto flat = input(tensor);
  if (!flat.is_same(tensor)) copy_back(tensor, flat);
  return flat;
}

std::function<void()> Staging::finish() && {
  if (steps_.empty() && copies_.empty()) return nullptr;
  return [steps = std::move(steps_), copies = std::move(copies_)] {
    for (const auto& step : steps) step();
    for (const auto& [to, from] : copies) to.copy_(from);
  };
}

} // namespace tessera::python
