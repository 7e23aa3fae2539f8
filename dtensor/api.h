#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/dtensor/redistribute_options.h>
#include <tessera/dtensor/spec.h>

namespace tessera {

class PendingDTensor;

/// A tensor that is distributed over a mesh: the same handle as its at::Tensor, with accessors. Constructing it from a plain
/// tensor is an error.
class DTensor : public at::Tensor {
 public:
  explicit DTensor(at::Tensor tensor);
  const Spec& spec() const;
  const DeviceMesh& mesh() const { return spec().mesh(); }
  const Placements& placements() const { return spec().placements(); }
  /// This rank's part, aliasing the DTensor's memory, outside autograd. See `to_local` for the differentiable one.
  at::Tensor local() const;
  /// Every rank of the mesh calls it. Differentiable.
  DTensor redistribute(const Placements& placements, const RedistributeOptions& options = {}) const;
  /// Moves to another mesh over the same ranks in any order or shape; an error for other ranks. Every one of them calls it.
  /// Shards go straight to the ranks that need them; other placements go over Replicate. Differentiable.
  DTensor redistribute(const DeviceMesh& mesh, const Placements& placements, const RedistributeOptions& options = {}) const;
  /// Starts the last collective of the redistribution, and returns without waiting for it. The result has the values that the
  /// tensor has now, whatever is written to it before `wait`, and shares no memory with it. Every rank of the mesh calls it.
  PendingDTensor redistribute_async(const Placements& placements) const;
  /// The whole tensor on every rank, plain. Every rank of the mesh calls it. Differentiable: the gradient is assumed to be the
  /// same on every rank, or else to have the `gradient_placements` (DTensor: grad_placements), as in `to_local`. Pass Partial
  /// if each rank computes something else from the whole, for example the loss of its own rows.
  at::Tensor full_tensor(const std::optional<Placements>& gradient_placements = std::nullopt) const;
};

/// A redistribution in flight.
class PendingDTensor {
 public:
  /// The redistributed tensor; differentiable. Blocks (CPU) or makes the current stream wait (CUDA) until it is valid. A second
  /// call returns the same. Throws what the collective failed with.
  DTensor wait();
  /// True when `wait` would not block.
  bool is_completed() const;

 private:
  friend class DTensor;
  struct State;
  explicit PendingDTensor(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

bool is_dtensor(const at::Tensor& tensor);

/// Scatters `tensor`: every rank keeps its part of the values of the mesh's first rank (DTensor: distribute_tensor). Every rank
/// of the mesh calls it with a plain tensor of the same shape and dtype. The result is a leaf that requires grad as `tensor`
/// does. A tensor that is no leaf is an error (as in DTensor): no gradient would reach it. Of a tensor on the meta device every
/// rank gets a part on it, and nothing is sent.
DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements);

/// A DTensor from each rank's part, whose memory it shares. Without a global shape, even shards are assumed; a RaggedShard over
/// several dims needs the shape. Without global strides, they are derived from the order of dims of the part, without its gaps.
/// Pass them if the parts of some ranks have another order of dims in memory, as a part of one row may. A view that the part does
/// not have because of gaps is a copy. Differentiable: the gradient has the same placements, with Replicate for Partial. No
/// communication.
DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                   std::optional<std::vector<int64_t>> global_sizes = std::nullopt,
                   const std::optional<std::vector<int64_t>>& global_strides = std::nullopt);

/// This rank's part as a differentiable plain tensor that shares the DTensor's memory. The gradient is assumed to have the same
/// placements, with Replicate for Partial, or else the `gradient_placements` (DTensor: grad_placements). Pass Partial if the
/// tensor is Replicate and each rank computes something else from it. No communication.
at::Tensor to_local(const at::Tensor& dtensor, const std::optional<Placements>& gradient_placements = std::nullopt);

/// While it lives, plain tensors among the arguments of a DTensor operator count as Replicate, in this thread and in the
/// backwards that it calls: every rank must hold the same values. Without it such a mix is an error, except for 0-dim tensors.
class ImplicitReplication {
 public:
  ImplicitReplication();
  ImplicitReplication(const ImplicitReplication&) = delete;
  ImplicitReplication& operator=(const ImplicitReplication&) = delete;

 private:
  c10::DebugInfoGuard scope_;
};

/// Prints any tensor, a DTensor with its spec and local values; of a meta tensor, which has none, shape and dtype.
std::string to_string(const at::Tensor& tensor);

} // namespace tessera
