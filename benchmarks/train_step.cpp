#include "train_step.h"

#include <gpt/memory.h>
#include <gpt/optimizer.h>
#include <gpt/sharding.h>
#include <tessera/collectives/process_context.h>

#include <functional>

namespace tessera::benchmarks {
namespace {

gpt::Gpt make_model(const gpt::Options& options) {
  torch::manual_seed(options.seed);
  return gpt::Gpt(options.model);
}

CollectiveCounts count_during(const std::function<void()>& part) {
  auto& context = process_context();
  CollectiveCounts counts;
  for (int kind = 0; kind < kCollectiveKinds; ++kind) {
    counts[static_cast<CollectiveKind>(kind)] = -context.count(static_cast<CollectiveKind>(kind)).calls;
  }
  part();
  for (auto& [kind, calls] : counts) calls += context.count(kind).calls;
  return counts;
}

} // namespace

TrainStep::TrainStep(const gpt::Options& options)
    : model_(make_model(options)),
      optimizer_(gpt::make_optimizer(*model_, options)),
      largest_norm_(options.clip),
      parameters_(gpt::parameter_count(*model_)) {
  const int world = process_context().world_size();
  gpt::check_world(options, world);
  if (options.strategy != gpt::Strategy::kNone) {
    mesh_ = gpt::make_mesh(options);
    gpt::shard(model_, mesh_, options);
  }
  torch::manual_seed(options.seed + 1 + static_cast<uint64_t>(process_context().rank()));
  const auto device = mesh_.defined() ? mesh_.device() : torch::Device(torch::kCPU);
  const auto windows =
      torch::randint(gpt::kVocabulary, {options.rows_a_rank(world), options.model.sequence + 1}, torch::kLong).to(device);
  inputs_ = windows.narrow(1, 0, options.model.sequence);
  targets_ = windows.narrow(1, 1, options.model.sequence);
}

void TrainStep::run() {
  optimizer_.zero_grad();
  loss().backward();
  clip();
  optimizer_.step();
}

TrainStep::PartCounts TrainStep::count() {
  PartCounts counts;
  torch::Tensor value;
  optimizer_.zero_grad();
  counts.forward = count_during([&] { value = loss(); });
  counts.backward = count_during([&] { value.backward(); });
  counts.clip = count_during([&] { clip(); });
  counts.optimizer = count_during([&] { optimizer_.step(); });
  return counts;
}

int64_t TrainStep::state_bytes() const { return gpt::state_bytes(*model_, optimizer_); }

torch::Tensor TrainStep::loss() { return gpt::cross_entropy(model_->forward(inputs_), targets_); }

void TrainStep::clip() { torch::nn::utils::clip_grad_norm_(model_->parameters(), largest_norm_); }

} // namespace tessera::benchmarks
