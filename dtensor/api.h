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

/// A tensor laid over a mesh; the same handle as its at::Tensor, with accessors. Constructing it from a tensor that is none is an
/// error.
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
  /// To another mesh over the same ranks in any order or shape; an error for other ranks. Every one of them calls it. Shards go
  /// straight to the ranks that need them; other placements go over Replicate. Differentiable.
  DTensor redistribute(const DeviceMesh& mesh, const Placements& placements, const RedistributeOptions& options = {}) const;
  /// Starts the last collective of the redistribution, and returns without waiting for it. The result has the values that the
  /// tensor has now, whatever is written to it before `wait`, and shares no memory with it. Every rank of the mesh calls it.
  PendingDTensor redistribute_async(const Placements& placements) const;
  /// The whole tensor on every rank, plain. Every rank of the mesh calls it. Differentiable.
  at::Tensor full_tensor() const;
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
/// does.
DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements);

/// A DTensor from each rank's part, whose memory it shares. The global shape is derived as for even shards unless given; a
/// RaggedShard over several dims needs it. The strides are derived from the part's unless given: give them where the parts of
/// some ranks lie in memory in another order of dims, as one of a single row may. Differentiable: the gradient is laid out like
/// the placements, Replicate for Partial. No communication.
DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                   std::optional<std::vector<int64_t>> global_sizes = std::nullopt,
                   const std::optional<std::vector<int64_t>>& global_strides = std::nullopt);

/// This rank's part as a differentiable plain tensor that shares the DTensor's memory. The gradient is taken to be laid out like
/// the placements, Replicate for Partial, or as `gradient_placements` say (DTensor: grad_placements): Partial where the tensor is
/// Replicate and each rank makes something else of it. No communication.
at::Tensor to_local(const at::Tensor& dtensor, const std::optional<Placements>& gradient_placements = std::nullopt);

/// While it lives, plain tensors among the arguments of a DTensor operator count as Replicate, in this thread and in the
/// backwards that it calls: every rank holds the same values. Without it such a mix is an error (0-dim tensors aside).
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
