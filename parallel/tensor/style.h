#pragma once

// Internal: the parameters of tensor parallelism, a kind of tensors whose reads are seen.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include <tessera/dtensor/placement.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/overlap.h>
#include <tessera/reads/gradient_terms.h>

namespace tessera::internal::parallel {

extern const ReadKind& kStyledParameters; ///< style_kind.cpp

/// It says where the activations beside a parameter go, and what becomes of results.
struct Style final : ReadMark, GradientTerms, std::enable_shared_from_this<Style> {
  Placement plain_input = Replicate{};       ///< how a plain activation lies
  std::optional<Placement> input = {};       ///< where an activation is brought; none: as the split of the parameter asks
  std::optional<Placement> output = {};      ///< where a result goes; none: stays as it is, a Partial becomes Replicate
  std::optional<Placement> looked_up = {};   ///< the same of what is looked up in a table
  OverlapOptions overlap = {};               ///< of products with it
  DeviceMesh groups = {};                    ///< each computes its part of the output features; undefined: each rank all
  bool has_terms = false;                    ///< gradients may be terms of a sum over the ranks
  c10::intrusive_ptr<const TensorName> name; ///< of the parameter, for errors

  void put_on(const at::Tensor& dtensor, bool casts) const override;
  bool gives_terms() const override { return has_terms; }
};

/// The meta of a parameter that has a style, and of its views.
struct StyledMeta : ReadMeta {
  StyledMeta(const DTensorMeta& of, std::shared_ptr<const Style> own_style, bool casts_beside);
  std::shared_ptr<const ReadMark> mark() const override { return style; }
  bool places_gradient() const override { return false; } // late_sums.h does
  std::shared_ptr<const Style> style;
  bool casts; ///< floating-point activations beside it get its dtype
};

/// Null for any other tensor.
StyledMeta* styled_meta(const at::TensorBase& tensor);

} // namespace tessera::internal::parallel
