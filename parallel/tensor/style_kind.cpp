// What an operator gets that reads a parameter with a style, and where its result goes.

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/mesh/part_order.h>
#include <tessera/nn/float8_codes.h>
#include <tessera/parallel/tensor/entered.h>
#include <tessera/parallel/tensor/gather_again.h>
#include <tessera/parallel/tensor/key_heads.h>
#include <tessera/parallel/tensor/late_sums.h>
#include <tessera/parallel/tensor/overlapped.h>
#include <tessera/parallel/tensor/style.h>
#include <tessera/reads/read_call.h>

namespace tessera::internal::parallel {

namespace {

/// How an operator reads a weight.
enum class Use : uint8_t {
  kOther,       ///< in no way of its own
  kLinear,      ///< [out, in]
  kCodedLinear, ///< [out, in], in codes
  kProduct,     ///< [in, out]
  kConvolution, ///< [out, in, …]
  kTable,       ///< [rows, width]
};

/// The positions of the weight and of the activation among the arguments of an operator.
struct Reading {
  Use use = Use::kOther;
  size_t weight = 0, input = 0;
};

Reading read_positions(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  if (name == "aten::linear") return {Use::kLinear, 1, 0};
  if (name == "tessera::float8_linear") return {Use::kCodedLinear, 1, 0};
  if (name == "aten::matmul" || name == "aten::mm") return {Use::kProduct, 1, 0};
  if (name == "aten::addmm") return {Use::kProduct, 2, 1};
  if (name == "aten::embedding") return {Use::kTable, 0, 1};
  if (name == "aten::conv1d" || name == "aten::conv2d" || name == "aten::conv3d" || name == "aten::convolution")
    return {Use::kConvolution, 1, 0};
  return {};
}

/// The dim of a weight of `ndim` dims that meets the features of the activation.
int64_t contracted_dim(Use use, int64_t ndim) { return use == Use::kProduct ? std::max<int64_t>(ndim - 2, 0) : 1; }

/// The dim of the features in the activation.
int64_t feature_dim(Use use, int64_t weight_ndim, int64_t ndim) {
  if (use != Use::kConvolution) return ndim - 1;
  return ndim == weight_ndim ? 1 : 0; // without a batch
}

/// Where the activation has to lie beside a weight with `split`; nothing where the weight does not say.
std::optional<Placement> input_beside(const Placement& split, Use use, int64_t weight_ndim, int64_t ndim) {
  if (is_replicate(split)) return std::nullopt;
  if (use == Use::kTable || !shards_dim(split, contracted_dim(use, weight_ndim))) return Replicate{};
  const auto features = feature_dim(use, weight_ndim, ndim);
  if (const auto* strided = std::get_if<StridedShard>(&split)) return StridedShard{features, strided->split_factor};
  return Shard{features};
}

bool is_floating_activation(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_floating_point() && !styled_meta(tensor) &&
         !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

/// Whether `wanted` says something of a tensor of `ndim` dims.
bool fits(const Placement& wanted, int64_t ndim) {
  const auto* shard = std::get_if<Shard>(&wanted);
  return !shard || (shard->dim < ndim && shard->dim >= -ndim);
}

at::Tensor as_dtensor(const at::Tensor& tensor, const StyledMeta& beside) {
  if (is_dtensor(tensor)) return tensor;
  return from_local(tensor, beside.spec->mesh(), {at_dim(beside.style->plain_input, tensor.dim())});
}

std::string label_of(const ReadCall& call, const StyledMeta& meta) {
  const auto& name = meta.style->name;
  return call.op.schema().name() + (name ? " beside " + name->to_string() : "");
}

/// Casts the activations beside a parameter that has a dtype of its own in forward (fully_shard's param_dtype).
void cast_beside(ReadCall& call, at::ScalarType dtype) {
  call.replace([&](const at::Tensor& tensor, size_t argument) -> std::optional<at::Tensor> {
    if (!is_floating_activation(tensor) || tensor.dim() == 0 || tensor.scalar_type() == dtype) return std::nullopt;
    return call.traits.arguments[argument].written ? std::nullopt : std::optional(tensor.to(dtype));
  });
}

/// Whether `whole` was gathered of `part` for a weight with a gradient to come.
bool is_gathered_to_save(const at::Tensor& part, const at::Tensor& whole, const at::Tensor& weight) {
  const auto &from = *dtensor_meta(part)->spec, &to = *dtensor_meta(whole)->spec;
  return needs_graph(weight) && is_sharded(from.placements()[0]) && to.is_replicated() && from.mesh().size() > 1;
}

/// An error for an activation of another mesh than the weight beside it.
void check_alike(const at::Tensor& input, const StyledMeta& meta, const std::string& label) {
  const auto& mesh = dtensor_meta(input)->spec->mesh();
  TORCH_CHECK_VALUE(mesh == meta.spec->mesh(), label, " (rank ", process_context().rank(), "): the activation is on ",
                    mesh.to_string(), ", the parameter on ", meta.spec->mesh().to_string(),
                    part_dim(mesh) ? ". With tensor parallelism, parts of sequences are plain: call the model with to_local of "
                                     "what split_sequence gives, in a ContextParallelScope with the parts' mesh"
                                   : "");
}

/// Runs a layer of one product beside its collective, if its style asks for that and it has one. `input` wants to be `wanted`.
bool run_overlapped(ReadCall& call, const Reading& reading, const at::Tensor& input, const Placement& wanted,
                    const std::string& label) {
  const at::Tensor weight = call.arguments[reading.weight].toTensor();
  const auto& style = *styled_meta(weight)->style;
  const bool is_linear = reading.use == Use::kLinear, is_product = reading.use == Use::kProduct && reading.input == 0;
  if (style.overlap.when == Overlap::kNever || (!is_linear && !is_product) || weight.dim() != 2) return false;
  const InsideLayer inside;
  const auto leaves = style.output ? std::optional(at_dim(*style.output, input.dim())) : std::nullopt;
  auto result = overlapped_product({input, is_linear ? weight.t() : weight, wanted, leaves, label}, style.overlap);
  if (!result.defined()) return false;
  if (is_linear && call.arguments[2].isTensor() && call.arguments[2].toTensor().defined())
    result = result + call.arguments[2].toTensor();
  if (style.output) result = left(result, *leaves, label);
  call.arguments[0] = result;
  call.return_arguments(1);
  return true;
}

/// The dim of a weight of 2 dims that makes the features of the result.
int64_t output_dim(Use use) { return use == Use::kProduct ? 1 : 0; }

/// Whether each group of ranks computes its part of the features alone. Codes of a weight are made of the whole, and a program
/// may read a part of a weight.
bool computes_in_groups(const Reading& reading, const at::Tensor& weight, const at::Tensor& input) {
  const auto& style = *styled_meta(weight)->style;
  if (!style.groups.defined() || style.output || weight.dim() != 2 || !dtensor_meta(input)->spec->is_replicated()) return false;
  const bool is_product = reading.use == Use::kLinear || reading.use == Use::kProduct;
  return is_product && weight.size(output_dim(reading.use)) % style.groups.size(0) == 0;
}

/// Puts a layer, whose activation is whole, on the groups of its ranks, with this group's part of the output features.
void read_layer_in_groups(ReadCall& call, const Reading& reading, const DeviceMesh& groups) {
  const auto bring = [&](size_t argument, std::optional<int64_t> cut) {
    call.arguments[argument] = read_in_groups(call.arguments[argument].toTensor(), groups, cut);
  };
  bring(reading.input, std::nullopt);
  bring(reading.weight, output_dim(reading.use));
  join_groups(call); // the bias
}

/// Whether a layer of codes, whose activation and result are split over the sequence, gathers codes of both by itself.
bool gathers_codes(const ReadCall& call, const Reading& reading, const at::Tensor& input) {
  if (reading.use != Use::kCodedLinear) return false;
  return gathers_float8(input, static_cast<Float8Scaling>(call.arguments[3].toInt()),
                        place_of(call.arguments[reading.weight].toTensor()));
}

/// Says where the result of a layer goes: where its style says, and at least to where no Partial is seen. Nothing if it stays.
std::optional<Placement> place_of_result(const at::Tensor& result, std::optional<Placement> goal) {
  if (!is_dtensor(result)) return std::nullopt;
  if (!goal && is_partial(dtensor_meta(result)->spec->placements()[0])) goal = Replicate{};
  return goal ? std::optional(at_dim(*goal, result.dim())) : std::nullopt;
}

/// Runs a layer: its activation enters, and its result leaves at once, so that no Partial is seen outside.
void run_layer(ReadCall& call, const Reading& reading) {
  const at::Tensor weight = call.arguments[reading.weight].toTensor();
  const auto& meta = *styled_meta(weight);
  const auto& style = *meta.style;
  const auto label = label_of(call, meta);
  auto input = as_dtensor(call.arguments[reading.input].toTensor(), meta);
  input = on_line(input, meta.spec->mesh(), label);
  check_alike(input, meta, label);
  auto wanted = style.input && reading.use != Use::kTable ? style.input : std::nullopt;
  if (!wanted) wanted = input_beside(meta.spec->placements()[0], reading.use, weight.dim(), input.dim());
  const at::Tensor given = input;
  if (wanted) wanted = at_dim(*wanted, input.dim());
  if (wanted && run_overlapped(call, reading, input, *wanted, label)) return;
  const bool of_codes = gathers_codes(call, reading, input);
  if (of_codes && wanted && is_replicate(*wanted)) wanted = dtensor_meta(input)->spec->placements()[0];
  if (wanted) input = entered(input, *wanted, label);
  call.arguments[reading.input] = input;
  if (computes_in_groups(reading, weight, input)) read_layer_in_groups(call, reading, style.groups);
  {
    const InsideLayer inside;
    std::optional<GatherAgain> again;
    if (is_gathered_to_save(given, input, weight)) again.emplace(given, input, label + " (backward)");
    input.reset();
    call.proceed();
  }
  const at::Tensor result = call.stack->back().toTensor();
  const auto place = place_of_result(result, reading.use == Use::kTable ? style.looked_up : style.output);
  if (place) call.stack->back() = of_codes ? left_with_gradient(result, *place, label) : left(result, *place, label);
}

/// Brings the activation of an operator that is no layer, as those of norms are none, where the style says: the first argument
/// with more dims than the parameter.
void bring_activation(ReadCall& call, const StyledMeta& meta, int64_t parameter_ndim) {
  const auto& style = *meta.style;
  bool is_first = true;
  call.replace([&](const at::Tensor& tensor, size_t) -> std::optional<at::Tensor> {
    if (!is_first || !is_floating_activation(tensor) || tensor.dim() <= parameter_ndim) return std::nullopt;
    is_first = false;
    auto x = as_dtensor(tensor, meta);
    if (!style.input || !fits(*style.input, x.dim()) || dtensor_meta(x)->spec->mesh() != meta.spec->mesh()) return x;
    return left(x, at_dim(*style.input, x.dim()), label_of(call, meta));
  });
}

/// Gives the views of a parameter its style.
void mark_views(const c10::IValue& results, const Style& style, bool casts) {
  const auto mark = [&](const at::Tensor& view) {
    if (is_dtensor(view) && !read_meta(view)) style.put_on(view, casts);
  };
  if (results.isTensor()) {
    mark(results.toTensor());
  } else if (results.isTensorList()) {
    for (const at::Tensor view : results.toTensorList()) mark(view);
  }
}

/// The first argument that has a style; undefined for none. A list's elements do not count.
at::Tensor styled_argument(const ReadCall& call) {
  for (const auto& value : call.arguments) {
    if (value.isTensor() && styled_meta(value.toTensor())) return value.toTensor();
  }
  return {};
}

/// Before a graph is made that leads to parameters: says where their gradients go.
void place_gradients(const ReadCall& call) {
  if (!at::GradMode::is_enabled()) return;
  dispatch::visit_tensors(call.traits, call.arguments, [](const at::Tensor& tensor, size_t) {
    if (styled_meta(tensor) && tensor.requires_grad() && tensor.is_leaf()) place_gradient_late(tensor);
  });
}

class StyleKind final : public ReadKind {
 public:
  constexpr StyleKind() : ReadKind(Turn::kAdapts) {}

  MetSet meets(const at::Tensor& /*tensor*/, size_t /*argument*/, const OperatorTraits& /*traits*/) const override {
    return Met::kDTensor;
  }

  void on_read(ReadCall& call) const override {
    place_gradients(call);
    const auto styled = styled_argument(call);
    if (!styled.defined()) return call.proceed();
    const auto* const meta = styled_meta(styled);
    const bool is_read = !call.traits.writes && !call.traits.is_metadata_only;
    if (is_read && !is_forward(call.origin())) forget_entered();
    if (is_read && !InsideLayer::is_here() && is_forward(call.origin())) {
      if (meta->casts) cast_beside(call, meta->spec->dtype());
      const auto& reading = dispatch::read_once<&read_positions>(call.op);
      if (reading.use != Use::kOther && styled_meta(call.arguments[reading.weight].toTensor())) return run_layer(call, reading);
      bring_activation(call, *meta, styled.dim());
    }
    if (!InsideLayer::is_here()) join_groups(call);
    const bool may_view = call.traits.returns_alias && !call.traits.writes && call.arguments[0].isTensor() &&
                          styled_meta(call.arguments[0].toTensor()) == meta;
    call.proceed();
    if (may_view) mark_views(call.stack->back(), *meta->style, meta->casts);
  }
};
constexpr StyleKind kStyleKind;

} // namespace

const ReadKind& kStyledParameters = kStyleKind;

} // namespace tessera::internal::parallel
