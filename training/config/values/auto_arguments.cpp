#include <tessera/training/config/values/auto_arguments.h>

namespace tessera::internal {

namespace {

template <typename T>
std::optional<Json> json_of(const std::optional<T>& value) {
  return value ? std::optional<Json>(*value) : std::nullopt;
}

std::optional<Json> betas_of(const TrainArguments& arguments) {
  if (!arguments.adam_beta1 || !arguments.adam_beta2) return std::nullopt;
  return Json::array({*arguments.adam_beta1, *arguments.adam_beta2});
}

} // namespace

Filling filling_of(AutoFill filler, const TrainArguments& arguments) {
  switch (filler) {
    case AutoFill::kMicroBatch: return {"micro_batch_size", json_of(arguments.micro_batch_size)};
    case AutoFill::kAccumulation: return {"accumulation_steps", json_of(arguments.accumulation_steps)};
    case AutoFill::kMaxGradNorm: return {"max_grad_norm", json_of(arguments.max_grad_norm)};
    case AutoFill::kLearningRate: return {"learning_rate", json_of(arguments.learning_rate)};
    case AutoFill::kBetas: return {"adam_beta1 and adam_beta2", betas_of(arguments)};
    case AutoFill::kEpsilon: return {"adam_epsilon", json_of(arguments.adam_epsilon)};
    case AutoFill::kWeightDecay: return {"weight_decay", json_of(arguments.weight_decay)};
    case AutoFill::kWarmupSteps: return {"warmup_steps", json_of(arguments.warmup_steps)};
    case AutoFill::kTotalSteps: return {"total_steps", json_of(arguments.total_steps)};
    case AutoFill::kFp16: return {"fp16", json_of(arguments.fp16)};
    case AutoFill::kBf16: return {"bf16", json_of(arguments.bf16)};
    case AutoFill::kTrainBatch:
    case AutoFill::kNothing:
    case AutoFill::kHiddenSize:
    case AutoFill::kNone: break;
  }
  return {};
}

} // namespace tessera::internal
