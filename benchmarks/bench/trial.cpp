#include "trial.h"

#include <common/memory.h>
#include <common/ranks.h>
#include <common/sharding.h>
#include <gpt/optimizer.h>
#include <tessera/tessera.h>

#include <algorithm>
#include <utility>

namespace tessera::benchmarks {
namespace {

/// On every rank, flat; a gradient that nobody has counts as zeros.
torch::Tensor flat(const std::vector<torch::Tensor>& tensors, const std::vector<torch::Tensor>& like) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> parts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i].defined() ? tensors[i] : like[i];
    const auto whole = is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
    parts.push_back((tensors[i].defined() ? whole : torch::zeros_like(whole)).flatten().to(torch::kFloat));
  }
  return torch::cat(parts);
}

torch::Tensor flat_gradient(const torch::nn::Module& module) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : module.parameters()) gradients.push_back(parameter.grad());
  return flat(gradients, module.parameters());
}

torch::Tensor flat_parameters(const torch::nn::Module& module) { return flat(module.parameters(), module.parameters()).clone(); }

void check_close(const char* what, const torch::Tensor& got, const torch::Tensor& expected, double tolerance) {
  const auto error = (got - expected).norm().item<double>(), size = expected.norm().item<double>();
  TORCH_CHECK(error <= tolerance * size, what, " of rank ", examples::rank(), " is wrong: of ", size, " it differs by ", error);
}

std::pair<Placements, Placements> placements_of(const std::string& transition) {
  const auto at = transition.find(" to ");
  const auto parse = [](const std::string& text) -> Placements {
    if (text == "R") return {Replicate{}};
    if (text == "P") return {Partial{}};
    return {Shard{text == "S(0)" ? 0 : 1}};
  };
  return {parse(transition.substr(0, at)), parse(transition.substr(at + 4))};
}

FullyShardOptions shard_options(const Settings& settings, const std::filesystem::path& folder) {
  const auto job = job_options(settings);
  FullyShardOptions options;
  options.strategy = job.strategy;
  options.layout = job.layout;
  options.communication = job.communication;
  options.reshard_after_forward = reshard_of(settings);
  if (settings.precision == "bf16") options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kBFloat16};
  if (settings.offload == "host") options.offload = offload_to_host();
  if (settings.offload == "files") options.offload = offload_to_files(folder);
  return options;
}

} // namespace

Trial::Trial(const Settings& settings, std::filesystem::path folder, const MemoryMeter& meter)
    : settings_(settings), folder_(std::move(folder)), mesh_(examples::make_mesh(job_options(settings))) {
  if (!has_model()) {
    const auto from = placements_of(settings_.transition).first;
    torch::manual_seed(1);
    const auto values = torch::randn({settings_.width, settings_.width});
    const bool is_sum = is_partial(from[0]); // of a term that each rank has
    source_ = is_sum ? from_local(values, mesh_, from) : distribute_tensor(values, mesh_, from);
    return;
  }
  model_ = make_model(settings_, examples::rank());
  reference_ = reference_gradient(meter);
  shard();
  gpt::Options options;
  options.optimizer = settings_.optimizer;
  options.learning_rate = 1e-4;
  options.weight_decay = 0.01;
  optimizer_ = gpt::make_optimizer(*model_.module, options);
}

void Trial::shard() {
  const auto options = shard_options(settings_, folder_);
  if (options.strategy != Strategy::kNoShard) { // one call makes buckets of it
    for (const auto& block : model_.blocks) fully_shard(*block, mesh_, options);
  }
  fully_shard(*model_.module, mesh_, options).set_reporting(true);
}

torch::Tensor Trial::reference_gradient(const MemoryMeter& meter) {
  const auto before = meter.now();
  const auto loss = model_.loss();
  activation_bytes_ = meter.now() - before;
  loss.backward();
  auto gradient = flat_gradient(*model_.module);
  model_.module->zero_grad();
  auto all = init_device_mesh(torch::kCPU, {examples::world_size()});
  all.communicator(0)->all_reduce(gradient, ReduceOp::kAvg, "reference gradient").wait();
  return gradient;
}

void Trial::step(const std::function<void(const char*)>& observe) {
  optimizer_->zero_grad();
  const auto loss = model_.loss();
  observe("forward");
  loss.backward();
  observe("backward");
  clip_grad_norm_(*model_.module, 1.0);
  observe("clip");
  tessera::step(*optimizer_);
  observe("optimizer");
}

void Trial::prepare() {
  const auto& measure = settings_.measure;
  if (measure == "optimizer") {
    optimizer_->zero_grad();
    model_.loss().backward();
  } else if (measure == "reduction") {
    optimizer_->zero_grad();
    loss_ = torch::zeros({});
    for (const auto& parameter : model_.module->parameters()) loss_ = loss_ + unsharded(parameter).flatten()[0];
  } else if (measure == "gather") {
    tessera::step(*optimizer_); // what was gathered is stale
  } else if (measure == "save") {
    if (examples::rank() == 0) std::filesystem::remove_all(folder_ / "saved");
    examples::sum_over_ranks({0}); // all see it gone
  }
}

void Trial::run(const std::function<void(const char*)>& observe) {
  const auto& measure = settings_.measure;
  if (measure == "step") return step(observe);
  if (measure == "optimizer") return void(tessera::step(*optimizer_));
  if (measure == "reduction") return std::exchange(loss_, torch::Tensor()).backward();
  if (measure == "redistribution") {
    const torch::NoGradGuard no_grad;
    loss_ = DTensor(source_).redistribute(placements_of(settings_.transition).second);
  } else if (measure == "gather") {
    for (const auto& block : model_.blocks) {
      if (is_sharded(*block)) fsdp(*block).unshard();
    }
    fsdp(*model_.module).unshard();
  } else if (measure == "state_dict") {
    state_dict(*model_.module, *optimizer_);
  } else if (measure == "save") {
    checkpoint::save(state_dict(*model_.module, *optimizer_), folder_ / "saved");
  } else if (measure == "load") {
    checkpoint::load(state_dict(*model_.module, *optimizer_), folder_ / "saved");
  }
}

void Trial::verify() {
  if (!has_model()) {
    run();
    const auto whole = [](const torch::Tensor& tensor) { return DTensor(tensor).full_tensor(); };
    return check_close("the redistributed tensor", whole(loss_), whole(source_), 1e-6);
  }
  verify_gradient();
  take_step();
  if (settings_.measure == "gather") verify_gather();
  if (settings_.measure == "save" || settings_.measure == "load") verify_load();
}

/// By how much codes change gradients and weights: int4 by an eighth of them, signs by most of them.
double Trial::coded_error() const {
  if (settings_.quantize.empty()) return 0;
  if (settings_.quantize.find("sign") != std::string::npos) return 1;
  return settings_.quantize.find("int4") != std::string::npos ? 0.3 : 0.06;
}

/// Of this rank's rows, averaged over all: what one process has that trains on all of them.
void Trial::verify_gradient() {
  model_.loss().backward();
  check_close("the gradient", flat_gradient(*model_.module), std::exchange(reference_, torch::Tensor()),
              std::max(coded_error(), settings_.precision == "bf16" ? 0.05 : 1e-4));
}

void Trial::verify_gather() {
  const auto expected = flat_parameters(*model_.module);
  run();
  std::vector<torch::Tensor> leaves;
  for (const auto& parameter : model_.module->parameters()) leaves.push_back(unsharded(parameter).detach());
  check_close("what was gathered", flat(leaves, leaves), expected,
              std::max(coded_error(), settings_.precision == "bf16" ? 0.01 : 0));
}

void Trial::verify_load() {
  const auto expected = flat_parameters(*model_.module);
  checkpoint::save(state_dict(*model_.module, *optimizer_), folder_ / "saved");
  take_step();
  checkpoint::load(state_dict(*model_.module, *optimizer_), folder_ / "saved");
  check_close("what was loaded", flat_parameters(*model_.module), expected, 0);
}

int64_t Trial::state_bytes() const { return has_model() ? examples::state_bytes(*model_.module, optimizer_.get()) : 0; }
int64_t Trial::parameter_count() const { return has_model() ? examples::parameter_count(*model_.module) : 0; }

} // namespace tessera::benchmarks
