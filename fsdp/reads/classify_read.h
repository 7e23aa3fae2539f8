#pragma once

// Internal: what a call does with the sharded parameters among its arguments.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include <tessera/mesh/device_mesh.h>
#include <tessera/reads/read_call.h>

namespace tessera::internal {

/// What a call does with the sharded parameters among its arguments.
enum class Use {
  kAsDTensors,    ///< reads or writes them as the DTensors that they are; or there are none
  kAmongDTensors, ///< in grad mode, beside other DTensors: a DTensor leaf takes a parameter's place
  kInForward,     ///< reads them whole: the unsharded leaf takes a parameter's place
  kWritesPlaces,  ///< writes those that a plain index or mask names: as to the whole, of which each rank keeps its part
};

/// Decides the use of all parameters among the arguments of a call; on each rank alike where the calls are.
Use classify(ReadCall& call);

/// Whether the op may give views of parameters that are no reads yet (`weight.t()`).
bool may_make_views(ReadCall& call);

/// A mesh of activations whose sequences are split over one of its dims (`split_sequence`).
struct SplitActivations {
  DeviceMesh mesh;
  int64_t dim;
};

/// The mesh of such DTensors that a call reads. The first DTensor without the key tells: those of one call lie on one mesh.
std::optional<SplitActivations> split_activations(const ReadCall& call);

/// A leaf itself, or the one that is this rank's part of a DTensor; null for any other tensor.
const at::Tensor* leaf_behind(const at::Tensor& tensor);

} // namespace tessera::internal
