#pragma once

// Internal: references to nodes of the autograd graph, which LibTorch 2.11 counts with the standard library and 2.15 intrusively.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <utility>

namespace tessera::internal {

using NodeReference = decltype(torch::autograd::Edge::function);

template <class T>
std::weak_ptr<T> weak(const std::shared_ptr<T>& reference) {
  return reference;
}
template <class T>
c10::weak_intrusive_ptr<T> weak(const c10::intrusive_ptr<T>& reference) {
  return c10::weak_intrusive_ptr<T>(reference);
}

/// Has `expired()` under both.
using WeakNodeReference = decltype(weak(std::declval<NodeReference>()));

} // namespace tessera::internal
