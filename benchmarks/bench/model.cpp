#include "model.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <unordered_set>

namespace tessera::benchmarks {
namespace {

/// Counts every storage once, whole: padding included, shared storages not twice.
class StorageCounter {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto local = is_dtensor(tensor) ? DTensor(tensor).local() : tensor;
    if (seen_.insert(local.storage().unsafeGetStorageImpl()).second) bytes_ += static_cast<int64_t>(local.storage().nbytes());
  }
  void add_bytes(int64_t bytes) { bytes_ += bytes; }
  int64_t bytes() const { return bytes_; }

 private:
  std::unordered_set<const c10::StorageImpl*> seen_;
  int64_t bytes_ = 0;
};

void check_model(const BenchModel& model, const std::string& name) {
  TORCH_CHECK(model.module, "model '", name, "': its recipe made no module");
  TORCH_CHECK(model.loss, "model '", name, "': its recipe made no loss");
  const auto modules = model.module->modules(/*include_self=*/false);
  for (size_t i = 0; i < model.blocks.size(); ++i) {
    const bool is_below = std::find(modules.begin(), modules.end(), model.blocks[i]) != modules.end();
    TORCH_CHECK(is_below, "model '", name, "': block ", i, " is no module below it");
  }
}

/// The parameters of a module itself, as most models begin.
void draw_weights(torch::nn::Module& module) {
  constexpr double kDeviation = 0.02;
  const at::NoGradGuard no_grad;
  for (auto& item : module.named_parameters(/*recurse=*/false)) {
    auto& parameter = item.value();
    if (parameter.dim() > 1) {
      torch::nn::init::normal_(parameter, 0, kDeviation);
    } else {
      parameter.fill_(item.key() == "weight" ? 1 : 0);
    }
  }
  for (auto& item : module.named_buffers(/*recurse=*/false)) item.value().zero_();
}

} // namespace

BenchModel make_model(const BenchRecipe& recipe, const Settings& settings, Weights weights) {
  at::manual_seed(1);
  const auto make = [&] { return recipe.model(settings); };
  auto model = weights == Weights::kOnMeta ? on_meta(make) : make();
  check_model(model, settings.model);
  return model;
}

std::vector<at::Tensor> make_batch(const BenchRecipe& recipe, const Settings& settings, const BenchPlace& place) {
  auto batch = recipe.batch(settings, place);
  TORCH_CHECK(!batch.empty(), "model '", settings.model, "': its batch maker gave no tensor on rank ", place.rank);
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto& tensor = batch[i];
    TORCH_CHECK(tensor.defined() && tensor.dim() > 0, "model '", settings.model, "': its batch maker gave no rows as tensor ", i,
                " on rank ", place.rank, " in step ", place.step);
    TORCH_CHECK(tensor.size(0) == settings.batch, "model '", settings.model, "': its batch maker gave ", tensor.size(0),
                " rows as tensor ", i, " on rank ", place.rank, " in step ", place.step, ", but ", settings.batch,
                " were asked for");
  }
  return batch;
}

at::Tensor loss_of(const BenchModel& model, const Settings& settings, const std::vector<at::Tensor>& batch) {
  auto loss = model.loss(batch);
  TORCH_CHECK(loss.defined() && loss.numel() == 1, "model '", settings.model, "': its loss on rank ", process_context().rank(),
              " is ", loss.defined() ? c10::str("of shape ", loss.sizes()) : "undefined", ", but must be one number");
  TORCH_CHECK(loss.requires_grad(), "model '", settings.model, "': its loss on rank ", process_context().rank(),
              " needs no gradient: it does not depend on a parameter that is trained, or was detached from them");
  return loss;
}

void shard_model(const BenchModel& model, const Settings& settings, const DeviceMesh& mesh, const std::filesystem::path& folder) {
  const auto options = shard_options(settings, folder);
  if (options.strategy != Strategy::kNoShard) { // one call makes buckets of it
    for (const auto& block : model.blocks) fully_shard(*block, mesh, options);
  }
  fully_shard(*model.module, mesh, options).set_reporting(true);
}

void give_weights(torch::nn::Module& module, const BenchRecipe& recipe) {
  if (!recipe.weights) {
    materialize(module, draw_weights);
    return;
  }
  materialize(module, [](torch::nn::Module&) {});
  recipe.weights(module);
}

int64_t parameter_count(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const auto& parameter : module.parameters()) count += parameter.numel();
  return count;
}

int64_t state_bytes(const torch::nn::Module& module, torch::optim::Optimizer& optimizer) {
  StorageCounter counter;
  for (const auto& parameter : module.parameters()) {
    counter.add(parameter);
    counter.add(parameter.grad());
  }
  const auto state = state_dict(module, optimizer);
  for (const auto& entry : state.entries()) {
    if (entry.is_tensor() && entry.name.starts_with("optimizer.")) counter.add(state.tensor(entry.name));
  }
  const auto add_gathered = [&](const torch::nn::Module& each) {
    if (!is_sharded(each)) return;
    const auto handle = fsdp(each);
    counter.add_bytes(handle.unsharded_bytes() + handle.kept_bytes());
  };
  for (const auto& each : module.modules(/*include_self=*/false)) add_gathered(*each);
  add_gathered(module);
  return counter.bytes();
}

} // namespace tessera::benchmarks
