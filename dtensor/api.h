#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include <tessera/dtensor/spec.h>

namespace tessera {

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
  DTensor redistribute(const Placements& placements) const;
  /// The whole tensor on every rank, plain. Every rank of the mesh calls it. Differentiable.
  at::Tensor full_tensor() const;
};

bool is_dtensor(const at::Tensor& tensor);

/// Scatters `tensor`: every rank keeps its part of the values of the mesh's first rank (DTensor: distribute_tensor). Every rank
/// of the mesh calls it with a plain tensor of the same shape and dtype. The result is a leaf that requires grad as `tensor`
/// does.
DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements);

/// A DTensor from each rank's part, whose memory it shares. Global shape and strides are derived as for even shards unless given;
/// a RaggedShard over several dims needs the shape. Differentiable: the gradient is laid out like the placements, Replicate for
/// Partial. No communication.
DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                   std::optional<std::vector<int64_t>> global_sizes = std::nullopt,
                   const std::optional<std::vector<int64_t>>& global_strides = std::nullopt);

/// This rank's part as a differentiable plain tensor that shares the DTensor's memory. The gradient is taken to be laid out like
/// the placements, Replicate for Partial. No communication.
at::Tensor to_local(const at::Tensor& dtensor);

/// While it lives, plain tensors among the arguments of a DTensor operator count as Replicate on this thread: every rank holds
/// the same values. Without it such a mix is an error (0-dim tensors aside).
class ImplicitReplication {
 public:
  ImplicitReplication();
  ~ImplicitReplication();
  ImplicitReplication(const ImplicitReplication&) = delete;
  ImplicitReplication& operator=(const ImplicitReplication&) = delete;
};

/// Prints any tensor, a DTensor with its spec and local values.
std::string to_string(const at::Tensor& tensor);

} // namespace tessera
