#pragma once

// Internal: how the tensors of a message look, which their receiver must know to have memory for them.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/stages/value_tree.h>

namespace tessera::internal::pipeline {

/// How a DTensor of tensor parallelism lies. The receiver has the same place in the dims of its own mesh.
struct HeaderLayout {
  std::vector<int64_t> sizes;    ///< of the whole
  std::vector<std::string> dims; ///< names in the pipeline's root mesh
  /// The mesh's own names of them, which say how a sequence was split ("cp:head-tail").
  std::vector<std::string> names;
  std::vector<int64_t> shards; ///< for each dim of the mesh the dim that it splits, or -1: Replicate
  bool operator==(const HeaderLayout&) const = default;
};

struct TensorHeader {
  std::optional<c10::ScalarType> dtype; ///< none: an undefined tensor
  std::vector<int64_t> sizes;           ///< of what is sent
  bool requires_grad = false;
  std::optional<HeaderLayout> layout; ///< of a DTensor
  bool operator==(const TensorHeader&) const = default;
  std::string describe() const;
};

struct MessageHeader {
  std::string structure;
  int64_t numbers = 0;
  std::vector<TensorHeader> tensors;
  bool operator==(const MessageHeader&) const = default;

  std::string to_text() const;
  static MessageHeader of_text(const std::string& text);
};

/// The header of `value`; `what` names it in errors. Throws for tensors that cannot be sent: sparse ones, DTensors that are
/// neither Replicate nor Shard or lie on other meshes than slices of the pipeline's root.
MessageHeader header_of(const FlatValue& value, const DeviceMesh& pipeline, const std::string& what);

/// What is sent of a tensor: contiguous, without a graph; of a DTensor this rank's part.
at::Tensor payload_of(const at::Tensor& tensor);
/// The tensor that `payload` stands for, a leaf that requires a gradient as the sender's does.
at::Tensor tensor_of(const at::Tensor& payload, const TensorHeader& header, const DeviceMesh& pipeline);

} // namespace tessera::internal::pipeline
