// The dtypes, and the loss scale.
#include <c10/util/Exception.h>

#include <cmath>

#include <tessera/training/config/sections.h>

namespace tessera::internal {

namespace {

c10::ScalarType dtype_of(const std::string& name) {
  return name == "fp32" ? c10::kFloat : name == "fp16" ? c10::kHalf : c10::kBFloat16;
}

/// The half precision of the file: DeepSpeed's "model dtype".
c10::ScalarType model_dtype(const ConfigValues& values) {
  const bool fp16 = values.boolean("fp16.enabled"), bf16 = values.boolean("bf16.enabled");
  TORCH_CHECK_VALUE(!fp16 || !bf16, values.source(), ": fp16.enabled and bf16.enabled are both true");
  return fp16 ? c10::kHalf : bf16 ? c10::kBFloat16 : c10::kFloat;
}

void check_param_dtype(const ConfigValues& values, c10::ScalarType model) {
  const auto name = values.optional_text("data_types.param_dtype");
  TORCH_CHECK_VALUE(!name || dtype_of(*name) == model, values.where("data_types.param_dtype"), " is ", name.value_or(""),
                    ", but fp16.enabled and bf16.enabled make the parameters ", model);
}

/// What gradients are reduced in, and wait in: DeepSpeed has two keys, which here must agree.
std::optional<c10::ScalarType> reduce_dtype_of_file(const ConfigValues& values) {
  const auto wait = values.optional_text("data_types.grad_accum_dtype"), send = values.optional_text("communication_data_type");
  TORCH_CHECK_VALUE(!wait || !send || *wait == *send, values.where("data_types.grad_accum_dtype"), " is ", wait.value_or(""),
                    " and communication_data_type is ", send.value_or(""),
                    ": here gradients wait in the dtype in which they are sent");
  if (!wait && !send) return std::nullopt;
  return dtype_of(wait ? *wait : *send);
}

bool keeps_bf16_masters(const ConfigValues& values) {
  const bool masters = values.boolean("bf16.bf16_master_weights_and_grads"),
             states = values.boolean("bf16.bf16_optimizer_states");
  TORCH_CHECK_VALUE(masters == states, values.where("bf16.bf16_master_weights_and_grads"), " is ", masters,
                    " and bf16_optimizer_states is ", states,
                    ": here an optimizer's state has the dtype of the parameter, so both must be true or both false");
  return masters;
}

std::string name_of_precision(const ConfigValues& values, c10::ScalarType model) {
  const bool is_full = keeps_bf16_masters(values);
  const auto name = values.optional_text("tessera.precision");
  if (!name) return model == c10::kFloat ? "fp32" : is_full ? "bf16_full" : "deepspeed";
  TORCH_CHECK_VALUE(model != c10::kHalf || *name == "deepspeed", values.where("tessera.precision"), " is ", *name,
                    ", but fp16.enabled is true");
  TORCH_CHECK_VALUE(model != c10::kBFloat16 || *name != "fp32", values.where("tessera.precision"),
                    " is fp32, but bf16.enabled is true");
  TORCH_CHECK_VALUE(!is_full || *name == "bf16_full", values.where("tessera.precision"), " is ", *name,
                    ", but bf16.bf16_master_weights_and_grads is true");
  return *name;
}

} // namespace

PrecisionConfig precision_of(const ConfigValues& values) {
  const auto model = model_dtype(values);
  check_param_dtype(values, model);
  PrecisionConfig precision{.name = name_of_precision(values, model)};
  auto& policy = precision.policy;
  const bool computes_in_half = precision.name == "bf16_mixed" || precision.name == "deepspeed";
  if (precision.name == "bf16_full") precision.parameters = c10::kBFloat16;
  if (computes_in_half) {
    precision.parameters = c10::kFloat;
    policy.param_dtype = model == c10::kHalf ? c10::kHalf : c10::kBFloat16;
  }
  if (precision.name == "bf16_mixed") policy.reduce_dtype = c10::kFloat;
  if (precision.name == "deepspeed") policy.reduce_dtype = policy.param_dtype;
  if (const auto dtype = reduce_dtype_of_file(values)) policy.reduce_dtype = dtype;
  policy.keep_in_fp32 = values.texts("tessera.keep_in_fp32");
  return precision;
}

GradScalerOptions scaler_of(const ConfigValues& values) {
  if (!values.boolean("fp16.enabled")) return {.enabled = false};
  const auto scale = values.number("fp16.loss_scale");
  TORCH_CHECK_VALUE(std::isfinite(scale) && scale >= 0, values.where("fp16.loss_scale"), " is ", scale,
                    ", but must be 0, which is dynamic, or positive");
  if (scale > 0) return {.init_scale = scale, .rule = ScaleRule::kFixed};
  const auto power = values.integer("fp16.initial_scale_power"), window = values.integer("fp16.loss_scale_window"),
             hysteresis = values.integer("fp16.hysteresis"), least = values.integer("fp16.min_loss_scale");
  constexpr int64_t kMostPower = 127; // of a float
  TORCH_CHECK_VALUE(power >= 0 && power <= kMostPower, values.where("fp16.initial_scale_power"), " is ", power,
                    ", but must be 0 to 127");
  TORCH_CHECK_VALUE(window >= 1, values.where("fp16.loss_scale_window"), " is ", window, ", but must be positive");
  TORCH_CHECK_VALUE(hysteresis >= 1, values.where("fp16.hysteresis"), " is ", hysteresis, ", but must be positive");
  const double first = std::exp2(power);
  TORCH_CHECK_VALUE(least >= 1 && static_cast<double>(least) <= first, values.where("fp16.min_loss_scale"), " is ", least,
                    ", but must be positive, and not above the first scale, ", first);
  const bool has_zero = values.stage() > 0;
  return {.init_scale = first,
          .growth_interval = window,
          .hysteresis = has_zero ? hysteresis : 1,
          .consecutive_hysteresis = has_zero && values.boolean("fp16.consecutive_hysteresis"),
          .min_scale = static_cast<double>(least),
          .rule = ScaleRule::kDeepSpeed,
          .at_min_scale = has_zero ? AtMinScale::kError : AtMinScale::kStay};
}

} // namespace tessera::internal
