#include "trial.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <tessera/checkpoint.h>
#include <tessera/dtensor.h>
#include <tessera/fsdp.h>

#include <algorithm>
#include <utility>

#include "model.h"
#include "optimizers.h"
#include "ranks.h"

namespace tessera::benchmarks {
namespace {

/// On every rank, flat; a gradient that nobody has counts as zeros.
at::Tensor flat(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& like) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i].defined() ? tensors[i] : like[i];
    const auto whole = is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
    parts.push_back((tensors[i].defined() ? whole : at::zeros_like(whole)).flatten().to(at::kFloat));
  }
  return at::cat(parts);
}

at::Tensor flat_gradient(const torch::nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : module.parameters()) gradients.push_back(parameter.grad());
  return flat(gradients, module.parameters());
}

at::Tensor flat_parameters(const torch::nn::Module& module) { return flat(module.parameters(), module.parameters()).clone(); }

void check_close(const char* what, const at::Tensor& got, const at::Tensor& expected, double tolerance) {
  const auto error = (got - expected).norm().item<double>(), size = expected.norm().item<double>();
  TORCH_CHECK(error <= tolerance * size, what, " of rank ", rank(), " is wrong: of ", size, " it differs by ", error);
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

DeviceMesh mesh_of(const Settings& settings) {
  auto [sizes, names] = mesh_shape(settings);
  return init_device_mesh(at::kCPU, std::move(sizes), std::move(names));
}

} // namespace

Trial::Trial(const Settings& settings, const BenchRecipe& recipe, std::filesystem::path folder, const MemoryMeter& meter)
    : settings_(settings), recipe_(recipe), folder_(std::move(folder)), mesh_(mesh_of(settings)) {
  if (!has_model()) {
    make_source();
    return;
  }
  model_ = make_model(recipe, settings, settings.verify ? Weights::kReal : Weights::kOnMeta);
  batch_ = make_batch(recipe, settings, {rank(), world_size(), next_step_++});
  if (settings.verify) reference_ = reference_gradient(meter);
  shard_model(model_, settings, mesh_, folder_);
  if (!settings.verify) give_weights(module(), recipe);
  optimizer_ = make_optimizer(settings_.optimizer, module(), settings_.steps);
}

void Trial::make_source() {
  const auto from = placements_of(settings_.transition).first;
  at::manual_seed(1);
  const auto values = at::randn({settings_.width, settings_.width});
  const bool is_sum = is_partial(from[0]); // of a term that each rank has
  source_ = is_sum ? from_local(values, mesh_, from) : distribute_tensor(values, mesh_, from);
}

at::Tensor Trial::forward() const { return loss_of(model_, settings_, batch_); }

at::Tensor Trial::reference_gradient(const MemoryMeter& meter) {
  const auto before = meter.now();
  const auto loss = forward();
  activation_bytes_ = meter.now() - before;
  loss.backward();
  auto gradient = flat_gradient(module());
  module().zero_grad();
  auto all = init_device_mesh(at::kCPU, {world_size()});
  all.communicator(0)->all_reduce(gradient, ReduceOp::kAvg, "reference gradient").wait();
  return gradient;
}

void Trial::step(const std::function<void(const char*)>& observe) {
  optimizer_->zero_grad();
  loss_ = forward();
  observe("forward");
  loss_.backward();
  loss_ = loss_.detach();
  observe("backward");
  clip_grad_norm_(module(), 1.0);
  observe("clip");
  tessera::step(*optimizer_);
  observe("optimizer");
}

void Trial::prepare() {
  if (has_model()) {
    batch_.clear();
    batch_ = make_batch(recipe_, settings_, {rank(), world_size(), next_step_++});
  }
  const auto& measure = settings_.measure;
  if (measure == "optimizer") {
    optimizer_->zero_grad();
    forward().backward();
  } else if (measure == "reduction") {
    optimizer_->zero_grad();
    loss_ = at::zeros({});
    for (const auto& parameter : module().parameters()) loss_ = loss_ + unsharded(parameter).flatten()[0];
  } else if (measure == "gather") {
    tessera::step(*optimizer_); // what was gathered is stale
  } else if (measure == "save") {
    if (rank() == 0) std::filesystem::remove_all(folder_ / "saved");
    wait_for_all(); // all see it gone
  }
}

void Trial::run(const std::function<void(const char*)>& observe) {
  const auto& measure = settings_.measure;
  if (measure == "step") return step(observe);
  if (measure == "optimizer") return void(tessera::step(*optimizer_));
  if (measure == "reduction") return std::exchange(loss_, at::Tensor()).backward();
  if (measure == "redistribution") {
    const at::NoGradGuard no_grad;
    loss_ = DTensor(source_).redistribute(placements_of(settings_.transition).second);
  } else if (measure == "gather") {
    for (const auto& block : model_.blocks) {
      if (is_sharded(*block)) fsdp(*block).unshard();
    }
    fsdp(module()).unshard();
  } else if (measure == "state_dict") {
    state_dict(module(), *optimizer_);
  } else if (measure == "save") {
    checkpoint::save(state_dict(module(), *optimizer_), folder_ / "saved");
  } else if (measure == "load") {
    checkpoint::load(state_dict(module(), *optimizer_), folder_ / "saved");
  }
}

void Trial::verify() {
  if (!has_model()) {
    run();
    const auto whole = [](const at::Tensor& tensor) { return DTensor(tensor).full_tensor(); };
    return check_close("the redistributed tensor", whole(loss_), whole(source_), 1e-6);
  }
  if (settings_.verify) verify_gradient();
  if (settings_.verify || !is_of_a_step(settings_)) take_step(); // what is saved or gathered has the optimizer's state
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
  forward().backward();
  check_close("the gradient", flat_gradient(module()), std::exchange(reference_, at::Tensor()),
              std::max(coded_error(), settings_.precision == "bf16" ? 0.05 : 1e-4));
}

void Trial::verify_gather() {
  const auto expected = flat_parameters(module());
  run();
  std::vector<at::Tensor> leaves;
  for (const auto& parameter : module().parameters()) leaves.push_back(unsharded(parameter).detach());
  check_close("what was gathered", flat(leaves, leaves), expected,
              std::max(coded_error(), settings_.precision == "bf16" ? 0.01 : 0));
}

void Trial::verify_load() {
  const auto expected = flat_parameters(module());
  checkpoint::save(state_dict(module(), *optimizer_), folder_ / "saved");
  take_step();
  checkpoint::load(state_dict(module(), *optimizer_), folder_ / "saved");
  check_close("what was loaded", flat_parameters(module()), expected, 0);
}

int64_t Trial::items() const { return recipe_.items ? recipe_.items(settings_) : settings_.batch; }
double Trial::loss() const { return loss_.defined() ? loss_.item<double>() : 0; }
int64_t Trial::state_bytes() const { return has_model() ? benchmarks::state_bytes(*model_.module, *optimizer_) : 0; }
int64_t Trial::parameter_count() const { return has_model() ? benchmarks::parameter_count(*model_.module) : 0; }

} // namespace tessera::benchmarks
