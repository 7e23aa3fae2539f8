#include <tessera/training/uneven_batches.h>

#include <ATen/ops/tensor.h>

#include <tessera/fsdp/module_walk.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera::internal {

UnevenRounds::UnevenRounds(const torch::nn::Module& model, UnevenDivisor divisor) : divisor_(divisor) {
  if (!is_sharded(model)) {
    TORCH_CHECK_VALUE(
        !any_parameter(model, parameter_meta), "UnevenBatches: ", model.name(),
        " is not sharded itself, but modules below it are: give it the module that fully_shard was called on last, or "
        "call fully_shard on this one");
    return;
  }
  model_.emplace(fsdp(model));
  const auto& mesh = model_->mesh();
  if (mesh.size() > 1) communicator_ = (mesh.ndim() == 1 ? mesh : mesh.flatten()).communicator(0, "uneven batches");
}

int64_t UnevenRounds::begin(bool has_input, bool can_stand_in) {
  auto counts = at::tensor({has_input ? int64_t{1} : 0, can_stand_in ? int64_t{0} : 1}, at::kLong);
  if (communicator_) {
    counts = counts.to(model_->mesh().device());
    communicator_->all_reduce(counts, ReduceOp::kSum, "uneven batches").wait();
  }
  const auto ranks = counts[0].item<int64_t>(), without = counts[1].item<int64_t>();
  if (ranks == 0) {
    end();
    return 0;
  }
  TORCH_CHECK_VALUE(without == 0, "UnevenBatches: ", without, " of ", model_ ? model_->mesh().size() : 1,
                    " ranks never had a batch, and got none to stand in for it: give all ranks a stand_in");
  if (!model_) return ranks;
  const auto all = static_cast<double>(model_->mesh().size()), with_input = static_cast<double>(ranks);
  const double weight = divisor_ == UnevenDivisor::kRanksWithInput ? all / with_input : 1;
  model_->state()->schedule()->set_gradient_weight(has_input ? weight : 0);
  return ranks;
}

void UnevenRounds::end() {
  if (model_) model_->state()->schedule()->set_gradient_weight(1);
}

} // namespace tessera::internal
