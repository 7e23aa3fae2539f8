#pragma once

#include <ATen/core/Scalar.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <tessera/dtensor/api.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/part_order.h>

namespace tessera {

struct SequenceSplitOptions {
  PartOrder order = PartOrder::kHeadTail;
  /// Whether a sequence whose length does not divide is padded at its end. Otherwise it is an error that names the nearest
  /// lengths that do.
  bool pads = true;
  /// What is put at the padded positions of each tensor of the batch; 0 for those that the list does not reach.
  std::vector<at::Scalar> pad_values = {};
  /// The tensor of the batch whose next elements are the labels; none: no labels are made.
  std::optional<size_t> labels_of = std::nullopt;
  int64_t ignore_index = -100; ///< the label of the last position, and of padded ones
  /// Whether the ranks compare the values of the batch too, by a checksum. Its shapes are always compared.
  bool compares_values = true;
};

/// The parts of a batch, as DTensors on `mesh`.
struct SequenceParts {
  std::vector<DTensor> tensors; ///< Shard(dim) each
  /// A DTensor, int64 [length]: where each element was in the whole sequence, 0 where it was padded. For learned and rotary
  /// positions: the parts of one rank are no neighbours.
  at::Tensor positions;
  /// A DTensor as the tensor `labels_of`, int64: the element after each one in the whole sequence. Undefined without `labels_of`.
  at::Tensor labels;
  DeviceMesh mesh;    ///< the given one; its name says how the parts lie ("cp:head-tail"), which attention reads
  int64_t length = 0; ///< of the whole sequence, padding included
};

/// Splits the sequences of a batch over the ranks of `mesh`, which has one dim: `split_sequence({tokens}, {1}, mesh["cp"])`.
///
/// Each rank gives the whole batch, the same on all of them; `dims` says which dim of each tensor is the sequence, all of one
/// length. Labels are shifted before the split, so that the last element of each part has its label. The results are new tensors
/// on the mesh's device; those given are left as they are. Every rank of the mesh calls it. An error on every rank names the rank
/// whose batch has other shapes or values.
SequenceParts split_sequence(const std::vector<at::Tensor>& batch, const std::vector<int64_t>& dims, const DeviceMesh& mesh,
                             const SequenceSplitOptions& options = {});

/// An error on every rank unless all ranks of the mesh, which has one dim, have the same tensors: with the rank and the number of
/// the first tensor that differs. For the first step of a training: the ranks of tensor parallelism take the same rows, and would
/// give wrong numbers otherwise. (`split_sequence` compares those of its mesh by itself.) Every rank of the mesh calls it, with
/// as many tensors, plain ones; sends a few numbers for each.
void check_same_batch(const std::vector<at::Tensor>& batch, const DeviceMesh& mesh);

/// The inverse: the whole of a tensor on a mesh of `split_sequence`, plain, in the order of the positions and without padding, on
/// every rank. `dim` is the dim that is split. Every rank of the mesh calls it. Differentiable, as `full_tensor` is: the gradient
/// is assumed to be the same on every rank.
at::Tensor merge_sequence(const at::Tensor& tensor, int64_t dim);

} // namespace tessera
