#include <tessera/training/uneven_batches.h>

#include <ATen/ops/tensor.h>

#include <fmt/format.h>

#include <string>
#include <utility>

#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/foreign_groups.h>
#include <tessera/fsdp/model/module_walk.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera::internal {

UnevenRounds::UnevenRounds(const torch::nn::Module& model, UnevenDivisor divisor) : divisor_(divisor) {
  auto state = find_state(model);
  if (!state) {
    TORCH_CHECK_VALUE(
        !any_parameter(model, parameter_meta), "UnevenBatches: ", model.name(),
        " is not sharded itself, but modules below it are: give it the module that fully_shard was called on last, or "
        "call fully_shard on this one");
    return;
  }
  check_owns_all_parameters(model, "UnevenBatches", {state->schedule().get()});
  model_.emplace(std::move(state));
  const auto& mesh = model_->mesh();
  if (mesh.size() > 1) communicator_ = mesh.flatten().communicator(0, "uneven batches");
}

/// A group of the model whose gradients are not divided by the number of its ranks, as an error says it; empty for none.
std::string UnevenRounds::divided_otherwise() const {
  if (!model_ || divisor_ == UnevenDivisor::kAllRanks) return "";
  const auto ranks = static_cast<double>(model_->mesh().size());
  std::string differing;
  for_each_group(*model_->state(), /*recurse=*/true, [&](const GroupGradients& gradients) {
    const auto& group = gradients.group();
    const double divisor = gradients.settings.divide_factor.value_or(static_cast<double>(group.roles().mesh().size()));
    if (trains_any(group) && divisor != ranks && differing.empty())
      differing = fmt::format("those of {} by {}", group.label(), divisor);
  });
  return differing;
}

int64_t UnevenRounds::begin(BatchSource source) {
  const auto other = divided_otherwise();
  const bool has_input = source == BatchSource::kOwn, has_none = source == BatchSource::kNone;
  auto counts = at::tensor({int64_t{has_input}, int64_t{has_none}, int64_t{!other.empty()}}, at::kLong);
  if (communicator_) {
    counts = counts.to(model_->mesh().device());
    communicator_->all_reduce(counts, ReduceOp::kSum, "uneven batches").wait();
  }
  counts = counts.cpu();
  const auto ranks = counts[0].item<int64_t>(), without = counts[1].item<int64_t>(), differing = counts[2].item<int64_t>();
  if (ranks == 0) {
    end();
    return 0;
  }
  TORCH_CHECK_VALUE(without == 0, "UnevenBatches: ", without, " of ", model_ ? model_->mesh().size() : 1,
                    " ranks never had a batch, and got none to stand in for it: give all ranks a stand_in");
  if (!model_) return ranks;
  TORCH_CHECK_VALUE(differing == 0, "UnevenBatches: kRanksWithInput needs gradients that are divided by the model's ",
                    model_->mesh().size(), " ranks, but ", differing, " of them divide others by another number",
                    other.empty() ? "" : ", here " + other, ": call set_gradient_divide_factor(", model_->mesh().size(),
                    ") on the module of these, or take kAllRanks");
  const auto all = static_cast<double>(model_->mesh().size()), with_input = static_cast<double>(ranks);
  const double weight = divisor_ == UnevenDivisor::kRanksWithInput ? all / with_input : 1;
  model_->state()->schedule()->set_gradient_weight(this, has_input ? weight : 0);
  return ranks;
}

void UnevenRounds::end() {
  if (model_) model_->state()->schedule()->forget_gradient_weight(this);
}

} // namespace tessera::internal
