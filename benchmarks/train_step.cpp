#include "train_step.h"

#include <common/memory.h>
#include <gpt/optimizer.h>
#include <gpt/sharding.h>
#include <tessera/collectives/process_context.h>

namespace tessera::benchmarks {
namespace {

gpt::Gpt make_model(const gpt::Options& options) {
  torch::manual_seed(options.seed);
  gpt::Gpt model(options.model);
  model->set_recompute(options.recompute);
  return model;
}

} // namespace

TrainStep::TrainStep(const gpt::Options& options)
    : model_(make_model(options)),
      optimizer_(gpt::make_optimizer(*model_, options)),
      largest_norm_(options.clip),
      parameters_(examples::parameter_count(*model_)) {
  const int world = process_context().world_size();
  gpt::check_world(options, world);
  mesh_ = examples::make_mesh(options);
  if (mesh_.defined()) gpt::shard(model_, mesh_, options);
  const auto ranks_of_rows = world / options.data_ranks(world); // the ranks of tp have the same
  torch::manual_seed(options.seed + 1 + static_cast<uint64_t>(process_context().rank() / ranks_of_rows));
  const auto device = mesh_.defined() ? mesh_.device() : torch::Device(torch::kCPU);
  const auto windows =
      torch::randint(gpt::kVocabulary, {options.rows_a_rank(world), options.model.sequence + 1}, torch::kLong).to(device);
  inputs_ = windows.narrow(1, 0, options.model.sequence);
  targets_ = windows.narrow(1, 1, options.model.sequence);
}

void TrainStep::run() {
  run([](const char*) {});
}

void TrainStep::run(const std::function<void(const char*)>& observe) {
  optimizer_->zero_grad();
  const auto loss = gpt::cross_entropy(model_->forward(inputs_), targets_);
  observe("forward");
  loss.backward();
  observe("backward");
  torch::nn::utils::clip_grad_norm_(model_->parameters(), largest_norm_);
  observe("clip");
  optimizer_->step();
  observe("optimizer");
}

int64_t TrainStep::state_bytes() { return examples::state_bytes(*model_, optimizer_.get()); }

} // namespace tessera::benchmarks
