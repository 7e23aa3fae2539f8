#include <c10/util/Exception.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <algorithm>
#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/training/train_main.h>

namespace tessera {

namespace {

bool has_dim(const DeviceMesh& mesh, const char* name) {
  const auto& names = mesh.dim_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

} // namespace

TrainSetup::TrainSetup(TrainConfig config, c10::DeviceType device, std::vector<std::string> arguments)
    : config_(std::move(config)), mesh_(config_.make_mesh(device)), arguments_(std::move(arguments)) {}

RowOptions TrainSetup::rows() const { return {.batch = config_.batch.micro, .seed = config_.trainer.seed}; }

RowOptions TrainSetup::rows_to_evaluate() const {
  return {.batch = config_.batch.micro, .shuffle = false, .last_rows = LastRows::kUneven};
}

void TrainSetup::shard(torch::nn::Module& model, const std::vector<std::shared_ptr<torch::nn::Module>>& blocks) const {
  TORCH_CHECK(!has_dim(mesh_, "pp"),
              "TrainSetup::shard: the config splits layers over a dim pp; make the Pipeline in the program (docs/pipeline.md)");
  config_.set_dtype(model);
  if (has_dim(mesh_, "tp"))
    parallelize(model, mesh_["tp"], config_.parallel_plan(model), {.overlap = {.when = config_.sharding.overlap}});
  const auto shards = config_.shard_mesh(mesh_);
  const auto options = config_.shard_options();
  for (const auto& block : blocks) fully_shard(*block, shards, options);
  fully_shard(model, shards, options);
}

torch::optim::Optimizer& TrainSetup::make_optimizer(const torch::nn::Module& model) {
  optimizer_ = config_.make_optimizer(model);
  if (reduces_by_itself(config_.optimizer) && is_sharded(model)) fsdp(model).set_keeps_own_gradients(true);
  return *optimizer_;
}

void TrainSetup::check_optimizer(const torch::optim::Optimizer& optimizer) const {
  if (&optimizer != optimizer_.get()) config_.check_no_optimizer();
}

torch::optim::LRScheduler* TrainSetup::make_schedule(torch::optim::Optimizer& optimizer) {
  schedule_ = config_.make_schedule(optimizer);
  return schedule_.get();
}

} // namespace tessera
