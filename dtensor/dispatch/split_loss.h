#pragma once

// Internal: the cross entropy of logits whose classes are split over ranks.

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

namespace tessera::internal::dispatch {

/// Whether `split_cross_entropy` serves these arguments of cross_entropy_loss: DTensors [rows, classes] in fp32 or fp64 that
/// require a gradient, their classes split, and targets by number, without weights and smoothing.
bool serves_split_cross_entropy(c10::ArrayRef<c10::IValue> arguments);

/// cross_entropy_loss as the formula that it is. Autograd would take it for a softmax and a pick, and sum the gradient of the
/// pick over the classes of all ranks: in a row that is the gradient of the loss, which every rank has. So its backward sends
/// nothing. May be differentiated twice.
at::Tensor split_cross_entropy(c10::ArrayRef<c10::IValue> arguments);

} // namespace tessera::internal::dispatch
