// A config's sections as meshes, options and objects.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <type_traits>

#include <tessera/parallel/plan_for.h>
#include <tessera/training/train_config.h>

namespace tessera {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

std::vector<std::string> dims_of(const ShardingConfig& sharding, const std::vector<std::string>& wanted) {
  std::vector<std::string> dims;
  for (const auto& [dim, size] : sharding.mesh) {
    if (std::find(wanted.begin(), wanted.end(), dim) != wanted.end()) dims.push_back(dim);
  }
  return dims;
}

/// The dims of a mesh as one, where there are several.
DeviceMesh as_one(const DeviceMesh& mesh, const std::vector<std::string>& dims) {
  const auto slice = mesh[dims];
  return dims.size() == 1 ? slice : slice.flatten();
}

std::vector<at::Tensor> trained(const torch::nn::Module& model) {
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : model.parameters()) {
    if (parameter.requires_grad()) parameters.push_back(parameter);
  }
  return parameters;
}

template <typename Options>
struct OptimizerFor;
template <>
struct OptimizerFor<torch::optim::AdamOptions> : std::type_identity<FusedAdam> {};
template <>
struct OptimizerFor<torch::optim::AdamWOptions> : std::type_identity<FusedAdamW> {};
template <>
struct OptimizerFor<torch::optim::SGDOptions> : std::type_identity<FusedSGD> {};
template <>
struct OptimizerFor<torch::optim::AdagradOptions> : std::type_identity<FusedAdagrad> {};
template <>
struct OptimizerFor<LambOptions> : std::type_identity<Lamb> {};
template <>
struct OptimizerFor<LionOptions> : std::type_identity<Lion> {};
template <>
struct OptimizerFor<AdafactorOptions> : std::type_identity<Adafactor> {};
template <>
struct OptimizerFor<AdamW8bitOptions> : std::type_identity<AdamW8bit> {};
template <>
struct OptimizerFor<OneBitAdamOptions> : std::type_identity<OneBitAdam> {};
template <>
struct OptimizerFor<OneBitLambOptions> : std::type_identity<OneBitLamb> {};
template <>
struct OptimizerFor<ZeroOneAdamOptions> : std::type_identity<ZeroOneAdam> {};

/// The frozen parameters of `model` belong to no group.
std::unique_ptr<Optimizer> make_muon(const MuonConfig& config, const torch::nn::Module& model) {
  std::vector<OptimizerParamGroup> groups;
  for (auto& group : muon_groups(model, config.muon, config.adamw, config.others)) {
    std::vector<at::Tensor> parameters;
    for (const auto& parameter : group.params()) {
      if (parameter.requires_grad()) parameters.push_back(parameter);
    }
    if (!parameters.empty()) groups.emplace_back(std::move(parameters), group.options().clone());
  }
  return std::make_unique<Muon>(groups, config.muon);
}

} // namespace

DeviceMesh TrainConfig::make_mesh(c10::DeviceType device) const {
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  for (const auto& [dim, size] : sharding.mesh) {
    names.push_back(dim);
    shape.push_back(size);
  }
  return init_device_mesh(device, shape, names);
}

DeviceMesh TrainConfig::shard_mesh(const DeviceMesh& mesh) const {
  const auto outer = dims_of(sharding, {"replicate"}), inner = dims_of(sharding, {"shard", "cp"});
  if (row_of(sharding.strategy).outer) return DeviceMesh::concatenate({mesh[outer], as_one(mesh, inner)});
  return as_one(mesh, dims_of(sharding, {"replicate", "shard", "cp"}));
}

DeviceMesh TrainConfig::data_mesh(const DeviceMesh& mesh) const { return mesh[dims_of(sharding, {"replicate", "shard"})]; }

FullyShardOptions TrainConfig::shard_options() const {
  FullyShardOptions options;
  options.strategy = sharding.strategy;
  options.reshard_after_forward = sharding.reshard_after_forward;
  options.mixed_precision = precision.policy;
  options.layout = sharding.layout;
  options.initial_weights = sharding.initial_weights;
  options.offload = sharding.offload;
  options.communication = sharding.communication;
  return options;
}

TrainerOptions TrainConfig::trainer_options(const DeviceMesh& mesh) const {
  auto options = trainer;
  options.mesh = mesh;
  options.data_mesh = mesh[dims_of(sharding, {"replicate", "shard", "cp"})];
  options.config = resolved();
  return options;
}

void TrainConfig::set_dtype(torch::nn::Module& model) const {
  if (!precision.parameters) return;
  const at::NoGradGuard no_grad;
  for (auto& parameter : model.parameters()) {
    if (parameter.is_floating_point()) parameter.set_data(parameter.to(*precision.parameters));
  }
}

ParallelPlan TrainConfig::parallel_plan(torch::nn::Module& model) const {
  if (sharding.plan) return *sharding.plan;
  int64_t ranks = 1;
  for (const auto& [dim, size] : sharding.mesh) {
    if (dim == "tp") ranks = size;
  }
  return plan_for(model, {.ranks = ranks, .sequence = sharding.sequence_parallel});
}

std::unique_ptr<Optimizer> TrainConfig::make_optimizer(const torch::nn::Module& model) const {
  if (const auto* muon = std::get_if<MuonConfig>(&optimizer)) return make_muon(*muon, model);
  return make_optimizer(trained(model));
}

std::unique_ptr<Optimizer> TrainConfig::make_optimizer(const std::vector<at::Tensor>& parameters) const {
  return std::visit(
      [&](const auto& options) -> std::unique_ptr<Optimizer> {
        using Options = std::decay_t<decltype(options)>;
        if constexpr (std::is_same_v<Options, std::monostate>) {
          TORCH_CHECK(false, source_, ": there is no optimizer: give the block optimizer, or make one in the program");
        } else if constexpr (std::is_same_v<Options, MuonConfig>) {
          TORCH_CHECK(false, source_, ": Muon needs the model, to know its matrices: make_optimizer(*model)");
        } else {
          return std::make_unique<typename OptimizerFor<Options>::type>(parameters, options);
        }
      },
      optimizer);
}

std::unique_ptr<torch::optim::LRScheduler> TrainConfig::make_schedule(Optimizer& of) const {
  return std::visit(
      [&](const auto& options) -> std::unique_ptr<torch::optim::LRScheduler> {
        using Options = std::decay_t<decltype(options)>;
        if constexpr (std::is_same_v<Options, WarmupLROptions>) return std::make_unique<WarmupLR>(of, options);
        if constexpr (std::is_same_v<Options, WarmupDecayOptions>) return std::make_unique<WarmupDecayLR>(of, options);
        if constexpr (std::is_same_v<Options, WarmupCosineRatioOptions>)
          return std::make_unique<WarmupCosineRatioLR>(of, options);
        if constexpr (std::is_same_v<Options, LinearSchedule>) return std::make_unique<WarmupLinearLR>(of, options);
        if constexpr (std::is_same_v<Options, CosineSchedule>) return std::make_unique<WarmupCosineLR>(of, options);
        if constexpr (std::is_same_v<Options, WSDOptions>) return std::make_unique<WSDLR>(of, options);
        return nullptr;
      },
      schedule);
}

void TrainConfig::check_no_optimizer() const {
  TORCH_CHECK(!has_optimizer(), "there are two optimizers, one of the program and one in ", source_,
              ": leave the block optimizer out of the file, or the program's");
}

void TrainConfig::check_no_schedule() const {
  TORCH_CHECK(!has_schedule(), "there are two schedules, one of the program and one in ", source_,
              ": leave the block out of the file, or the program's");
}

bool reduces_by_itself(const OptimizerConfig& optimizer) {
  return std::holds_alternative<OneBitAdamOptions>(optimizer) || std::holds_alternative<OneBitLambOptions>(optimizer) ||
         std::holds_alternative<ZeroOneAdamOptions>(optimizer);
}

int64_t optimizer_tensors(const OptimizerConfig& optimizer) {
  return std::visit(
      [](const auto& options) -> int64_t {
        using Options = std::decay_t<decltype(options)>;
        if constexpr (std::is_same_v<Options, torch::optim::SGDOptions>) return options.momentum() != 0 ? 1 : 0;
        if constexpr (std::is_same_v<Options, torch::optim::AdamOptions> || std::is_same_v<Options, torch::optim::AdamWOptions>)
          return options.amsgrad() ? 3 : 2;
        if constexpr (std::is_same_v<Options, LambOptions>) return 2;
        // Moments and the error of what this rank sends; that of what it reduces is a rank's part.
        if constexpr (std::is_same_v<Options, OneBitAdamOptions> || std::is_same_v<Options, ZeroOneAdamOptions>) return 3;
        if constexpr (std::is_same_v<Options, OneBitLambOptions>) return 4;
        if constexpr (std::is_same_v<Options, torch::optim::AdagradOptions> || std::is_same_v<Options, LionOptions> ||
                      std::is_same_v<Options, MuonConfig>)
          return 1;
        return 0; // Adafactor's are rows and columns, those of AdamW8bit bytes
      },
      optimizer);
}

} // namespace tessera
