#include <tessera/fsdp/copy_list.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_zero.h>

#include <tuple>
#include <utility>

namespace tessera::internal {

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
    at::_foreach_copy_(alike.destinations, alike.sources);
  }
  while (!sums_.sources.empty()) {
    const auto alike = sums_.take_alike();
    at::_foreach_add_(alike.destinations, alike.sources);
  }
  zeroed_.clear();
}

} // namespace tessera::internal
