#include <tessera/fsdp/buffers/copy_list.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_zero.h>
#include <c10/core/ScalarType.h>

#include <tuple>
#include <utility>

#include <tessera/dtensor/redistribute/redistribute.h>

namespace tessera::internal {

namespace {

/// CUDA's kernel for lists of copies does not know all types: integers of the same size stand for these.
at::ScalarType copied_as(at::ScalarType dtype) {
  const bool is_byte = dtype == at::kFloat8_e8m0fnu || dtype == at::kFloat4_e2m1fn_x2;
  return is_byte ? at::kByte : signed_type(dtype);
}

bool is_known(const at::Tensor& tensor) { return copied_as(tensor.scalar_type()) == tensor.scalar_type(); }

} // namespace

void CopyList::copy(at::Tensor destination, at::Tensor source) {
  const auto dtype = source.scalar_type(), bits = copied_as(dtype);
  if (bits == dtype || destination.scalar_type() != dtype) return copies_.add(std::move(destination), std::move(source));
  copies_.add(destination.view(bits), source.view(bits));
}

void CopyList::Pairs::add(at::Tensor destination, at::Tensor source) {
  if (destination.numel() == 0) return;
  destinations.push_back(std::move(destination));
  sources.push_back(std::move(source));
}

CopyList::Pairs CopyList::Pairs::take_alike() {
  Pairs alike, rest;
  const auto kind = [&](size_t i) {
    return std::tuple(destinations[i].scalar_type(), sources[i].scalar_type(), destinations[i].strides() == sources[i].strides());
  };
  const auto first = kind(0);
  for (size_t i = 0; i < sources.size(); ++i) {
    auto& list = kind(i) == first ? alike : rest;
    list.add(std::move(destinations[i]), std::move(sources[i]));
  }
  *this = std::move(rest);
  return alike;
}

void CopyList::run() {
  if (!zeroed_.empty()) at::_foreach_zero_(zeroed_);
  while (!copies_.sources.empty()) {
    const auto alike = copies_.take_alike();
    if (is_known(alike.destinations[0]) && is_known(alike.sources[0])) {
      at::_foreach_copy_(alike.destinations, alike.sources);
    } else { // casts
      for (size_t i = 0; i < alike.sources.size(); ++i) alike.destinations[i].copy_(alike.sources[i]);
    }
  }
  while (!sums_.sources.empty()) {
    const auto alike = sums_.take_alike();
    at::_foreach_add_(alike.destinations, alike.sources);
  }
  zeroed_.clear();
}

} // namespace tessera::internal
