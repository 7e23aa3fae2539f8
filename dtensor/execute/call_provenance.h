#pragma once

// Internal: what the results of a call are computed from.

#include <absl/container/inlined_vector.h>

#include <memory>
#include <optional>
#include <utility>

#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

/// It is given each DTensor among the arguments of a call, and passes on to the results what these are computed from. An
/// optimizer's errors name the parameter also where the gradient has been through an operator (weight decay).
class CallProvenance {
 public:
  /// `reads_no_value`: the operator takes the shape alone.
  explicit CallProvenance(bool reads_no_value) : reads_no_value_(reads_no_value) {}

  void note(const at::Tensor& tensor, const DTensorMeta& meta) {
    if (from_parameters_) note_parameter(tensor, meta);
    if (C10_UNLIKELY(meta.provenance.name != nullptr) && !name_) name_ = meta.provenance.name;
  }
  void note_written(DTensorMeta& meta) {
    if (C10_UNLIKELY(meta.provenance.computed && meta.provenance.whole_dtype)) written_.push_back(&meta.provenance);
  }

  /// Is called once all arguments are noted.
  void pass_to_written() const {
    for (auto* written : written_) {
      written->of_shape_only &= from_shapes_;
      if (!from_parameters_) written->forget_parameters();
    }
  }

  /// `viewed` is what `result` is a view of; undefined where it is none.
  void pass_to(DTensorMeta& result, const at::Tensor& viewed) const {
    const bool from_parameters = from_parameters_ && dtype_;
    if (C10_LIKELY(!name_ && !from_parameters)) return;
    auto& provenance = result.provenance;
    provenance.name = name_;
    provenance.computed = true;
    if (from_parameters) provenance.whole_dtype = result.spec->dtype() == dtype_->first ? dtype_->second : result.spec->dtype();
    provenance.of_shape_only = from_parameters && from_shapes_;
    if (from_parameters && viewed.defined()) share_writes(result, viewed);
  }

  /// What is written to a view is written to what it is a view of, where that was computed as well.
  static void share_writes(DTensorMeta& view, const at::Tensor& viewed) {
    auto* source = dtensor_meta(viewed);
    if (!source || !(source->provenance.computed || source->local.is_inference())) return;
    auto& overwritten = source->provenance.overwritten;
    if (!overwritten) overwritten = std::make_shared<bool>(false);
    view.provenance.overwritten = overwritten;
  }

 private:
  static bool is_number(at::ScalarType dtype) { return at::isFloatingType(dtype) || at::isComplexType(dtype); }

  void note_parameter(const at::Tensor& tensor, const DTensorMeta& meta) {
    const auto whole_dtype = meta.provenance.current_whole_dtype();
    from_parameters_ = whole_dtype.has_value() && (reads_no_value_ || !needs_graph(tensor));
    from_shapes_ &= reads_no_value_ || meta.provenance.of_shape_only;
    if (!from_parameters_) return;
    const auto dtype = meta.spec->dtype();
    if (!dtype_ || !is_number(dtype_->first)) {
      dtype_.emplace(dtype, *whole_dtype);
    } else if (is_number(dtype)) {
      dtype_->second = c10::promoteTypes(dtype_->second, *whole_dtype);
    }
  }

  const bool reads_no_value_;
  c10::intrusive_ptr<const TensorName> name_;   ///< of the first argument that has one
  absl::InlinedVector<Provenance*, 1> written_; ///< of those with a `whole_dtype`
  bool from_parameters_ = true;                 ///< so far all DTensors are sharded parameters, or computed from such
  bool from_shapes_ = true;                     ///< … and no value of these was read
  std::optional<std::pair<at::ScalarType, at::ScalarType>> dtype_; ///< of the first number, and of what they make whole
};

} // namespace tessera::internal::dispatch
