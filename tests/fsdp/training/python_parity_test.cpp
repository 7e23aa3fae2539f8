// Each argument and strategy of Python's FSDP2: the losses of 20 steps, the steps that a gradient scaler skips, and what a
// forward without a backward leaves unsharded, by `tessera::call` and called directly.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/training/grad_scaler.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::python_parity_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kSteps = 20, kRows = 8, kFeatures = 8, kWidth = 16, kBlocks = 3;
constexpr double kFloatBound = 1e-5, kHalfBound = 2e-2, kHalfMeanBound = 5e-3;

/// Where shards, gradients and optimizer state lie. Python's are in the host's memory wherever they are not on the device.
enum class Offload { kNone, kToHost, kToFiles };

/// A case; python_parity.py reads all but the last three fields.
struct Case {
  std::string name;
  std::vector<int64_t> mesh = {world_size()};
  std::optional<ReshardAfterForward> reshard_after_forward = {};
  std::string shard_dim = {}; ///< of matrices; "largest": of all parameters
  std::string param_dtype = {}, reduce_dtype = {}, output_dtype = {};
  bool cast_forward_inputs = true;
  std::string ignored = {}; ///< a part of the names of parameters
  bool replicates = false;
  int64_t micro_batches = 1;
  std::string accumulates = {}; ///< "without sync", "without all-reduce", "without reshard"
  double max_norm = 0, norm_type = 2;
  bool scales = false;
  Offload offload = Offload::kNone;
  std::vector<std::string> setters = {};
  std::optional<tessera::Strategy> strategy = {}; ///< that Python has not: its full sharding is compared
  bool recomputes = false;
  bool is_of_one_process = true; ///< its losses are those of one process, in fp32
};

struct BlockImpl : nn::Module {
  BlockImpl()
      : scale(register_parameter("scale", torch::empty({kWidth}))),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        up(register_module("up", nn::Linear(kWidth, 2 * kWidth))),
        down(register_module("down", nn::Linear(nn::LinearOptions(2 * kWidth, kWidth).bias(false)))) {}
  Tensor forward(const Tensor& x) { return x + down(torch::gelu(up(norm(x)))) * scale; }
  Tensor scale;
  nn::LayerNorm norm;
  nn::Linear up, down;
};

struct NetImpl : nn::Module {
  NetImpl()
      : first(register_module("first", nn::Linear(kFeatures, kWidth))),
        blocks(register_module("blocks", nn::ModuleList())),
        head(register_module("head", nn::Linear(kWidth, kFeatures))) {
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(std::make_shared<BlockImpl>());
    const torch::NoGradGuard no_grad;
    auto items = named_parameters().pairs();
    std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t number = 0; number < items.size(); ++number) {
      auto& [name, parameter] = items[number];
      const auto wave = torch::sin(torch::arange(parameter.numel()) * 0.7 + static_cast<int64_t>(number)).view_as(parameter);
      const bool is_factor = name.find("norm.weight") != std::string::npos || name.find("scale") != std::string::npos;
      parameter.copy_(is_factor ? 1 + 0.1 * wave : 0.3 * wave);
    }
  }
  Tensor forward(const Tensor& x) {
    auto y = first(x);
    for (const auto& block : *blocks) {
      auto& each = *block->as<BlockImpl>();
      y = recomputes ? recompute(each, y) : each.forward(y);
    }
    return head(y);
  }
  nn::Linear first;
  nn::ModuleList blocks;
  nn::Linear head;
  bool recomputes = false;
};
TORCH_MODULE(Net);

Tensor batch(const Case& test_case, int64_t step, int64_t micro) {
  const auto wave = torch::arange(kRows * kFeatures) * 0.3 + static_cast<double>(step) * 1.7 + static_cast<double>(micro) * 0.9;
  auto rows = torch::sin(wave).view({kRows, kFeatures});
  if (test_case.scales && (step == 5 || step == 11)) rows[0] *= 3000; // overflows on rank 0 alone
  return rows;
}

std::optional<torch::ScalarType> dtype_of(const std::string& name) {
  if (name.empty()) return std::nullopt;
  return name == "bf16" ? torch::kBFloat16 : name == "fp16" ? torch::kHalf : torch::kFloat;
}

ShardPlacementFn placement_fn(const Case& test_case) {
  if (test_case.shard_dim.empty()) return nullptr;
  return [dim = test_case.shard_dim](const std::string&, const Tensor& parameter) -> std::optional<Placement> {
    const auto sizes = parameter.sizes();
    if (dim == "largest") return Shard{std::max_element(sizes.begin(), sizes.end()) - sizes.begin()};
    if (parameter.dim() != 2) return std::nullopt;
    return Shard{std::stoll(dim)};
  };
}

FullyShardOptions options_of(const Case& test_case, const Net& net, BufferLayout layout) {
  FullyShardOptions options;
  options.strategy = test_case.strategy;
  options.reshard_after_forward = test_case.reshard_after_forward;
  options.layout = layout;
  options.shard_placement_fn = placement_fn(test_case);
  if (test_case.offload == Offload::kToHost) options.offload = offload_to_host();
  if (test_case.offload == Offload::kToFiles) options.offload = offload_to_files(std::filesystem::temp_directory_path());
  auto& policy = options.mixed_precision;
  policy.param_dtype = dtype_of(test_case.param_dtype);
  policy.reduce_dtype = dtype_of(test_case.reduce_dtype);
  policy.cast_forward_inputs = test_case.cast_forward_inputs;
  for (const auto& item : net->named_parameters()) {
    const bool is_ignored = !test_case.ignored.empty() && item.key().find(test_case.ignored) != std::string::npos;
    if (is_ignored) options.ignored_params.push_back(item.value());
  }
  return options;
}

void apply_setter(Net& net, const std::string& name) {
  auto root = fsdp(*net);
  std::vector<FSDPModule> blocks;
  for (const auto& block : *net->blocks) blocks.push_back(fsdp(*block));
  if (name == "forward prefetch") {
    blocks[0].set_modules_to_forward_prefetch({blocks[1], blocks[2]});
  } else if (name == "backward prefetch") {
    blocks[2].set_modules_to_backward_prefetch({blocks[1], blocks[0]});
  } else if (name == "divide factor") {
    for (auto module : blocks) module.set_gradient_divide_factor(3);
    root.set_gradient_divide_factor(3);
  } else if (name == "no reshard after forward") {
    root.set_reshard_after_forward(false);
  } else {
    ASSERT_EQ(name, "reshard the root after forward");
    root.set_reshard_after_forward(true, /*recurse=*/false);
  }
}

void shard(Net& net, const Case& test_case, BufferLayout layout) {
  const std::vector<std::string> names =
      test_case.mesh.size() == 2 ? std::vector<std::string>{"replicate", "shard"} : std::vector<std::string>{"shard"};
  const auto mesh = init_device_mesh(torch::kCPU, test_case.mesh, names);
  auto options = options_of(test_case, net, layout);
  const auto wrap = [&](nn::Module& module) {
    test_case.replicates ? replicate(module, mesh, options) : fully_shard(module, mesh, options);
  };
  for (const auto& block : *net->blocks) wrap(*block);
  options.mixed_precision.output_dtype = dtype_of(test_case.output_dtype);
  wrap(*net);
  for (const auto& name : test_case.setters) apply_setter(net, name);
  net->recomputes = test_case.recomputes;
}

enum class Forward { kByCall, kDirectly };

/// Of this rank's rows for a sharded model, of all for another.
Tensor loss_of(Net& net, const Case& test_case, int64_t step, int64_t micro, Forward how = Forward::kByCall) {
  const bool shards = is_sharded(*net);
  auto x = batch(test_case, step, micro);
  if (shards) x = part_of(x, world_rank(), world_size());
  const auto in = test_case.cast_forward_inputs ? x : x.to(*dtype_of(test_case.param_dtype));
  const bool calls = shards && how == Forward::kByCall;
  const auto y = calls ? call(net, in) : net->forward(in);
  if (calls && !test_case.output_dtype.empty()) EXPECT_EQ(y.scalar_type(), dtype_of(test_case.output_dtype));
  return (y.to(torch::kFloat) - torch::tanh(2 * x.clamp(-1, 1))).square().mean();
}

double accumulate(Net& net, const Case& test_case, GradScaler& scaler, int64_t step) {
  double total = 0;
  for (int64_t micro = 0; micro < test_case.micro_batches; ++micro) {
    const bool is_last = micro == test_case.micro_batches - 1;
    if (is_sharded(*net)) {
      auto root = fsdp(*net);
      root.set_is_last_backward(is_last);
      if (test_case.accumulates == "without sync") root.set_requires_gradient_sync(is_last);
      if (test_case.accumulates == "without all-reduce") root.set_requires_all_reduce(is_last);
      if (test_case.accumulates == "without reshard") root.set_reshard_after_backward(is_last);
    }
    const auto loss = loss_of(net, test_case, step, micro) / test_case.micro_batches;
    scaler.scale(loss).backward();
    total += loss.item<double>();
  }
  return total;
}

/// The groups that are unsharded after a forward without a backward, by the names of their modules.
nlohmann::json open_after_evaluation(Net& net, const Case& test_case, Forward how) {
  auto open = nlohmann::json::array();
  if (!is_sharded(*net) || test_case.replicates) return open;
  std::vector<std::pair<std::string, FSDPModule>> modules{{"", fsdp(*net)}};
  for (size_t i = 0; i < net->blocks->size(); ++i) modules.emplace_back("blocks." + std::to_string(i), fsdp(*(*net->blocks)[i]));
  for (auto& [name, module] : modules) module.reshard();
  const torch::NoGradGuard no_grad;
  loss_of(net, test_case, kSteps, 0, how);
  for (const auto& [name, module] : modules) {
    if (module.unsharded_bytes() > 0) open.push_back(name);
  }
  return open;
}

/// The losses, this rank's or of the whole batch, and the rest of what python_parity.py prints.
nlohmann::json train(Net& net, const Case& test_case) {
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(2e-3).eps(1e-3));
  GradScaler scaler({.init_scale = 65536.0 * 16, .growth_interval = 3, .enabled = test_case.scales});
  auto result = nlohmann::json{{"losses", {}}, {"stepped", {}}, {"scales", {}}};
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const double loss = accumulate(net, test_case, scaler, step);
    result["losses"].push_back(is_sharded(*net) ? mean_over_ranks(torch::tensor(loss, torch::kDouble)).item<double>() : loss);
    if (test_case.max_norm > 0) clip_grad_norm_(*net, test_case.max_norm, test_case.norm_type);
    result["stepped"].push_back(scaler.step(optimizer));
    scaler.update();
    result["scales"].push_back(scaler.get_scale());
  }
  result["open"] = open_after_evaluation(net, test_case, Forward::kByCall);
  result["open without call"] = open_after_evaluation(net, test_case, Forward::kDirectly);
  return result;
}

nlohmann::json train_sharded(const Case& test_case, BufferLayout layout) {
  Net net;
  shard(net, test_case, layout);
  return train(net, test_case);
}

std::vector<Case> cases_of_parameters() {
  std::vector<Case> all{
      {.name = "reshard after forward", .reshard_after_forward = true},
      {.name = "kept after forward", .reshard_after_forward = false},
      {.name = "set to be kept after forward", .setters = {"no reshard after forward"}},
      {.name = "set to free the root", .setters = {"reshard the root after forward"}},
      {.name = "prefetch lists", .setters = {"forward prefetch", "backward prefetch"}},
      {.name = "recomputed", .recomputes = true},
      {.name = "Shard(0)", .shard_dim = "0"},
      {.name = "Shard(1)", .shard_dim = "1"},
      {.name = "the largest dim", .shard_dim = "largest"},
      {.name = "ignored parameters", .ignored = "scale", .is_of_one_process = false},
  };
  if (world_size() > 2) all.push_back({.name = "among neighbours after forward", .reshard_after_forward = 2});
  return all;
}

std::vector<Case> cases_of_gradients() {
  return {
      {.name = "accumulation", .micro_batches = 3},
      {.name = "accumulation without sync", .micro_batches = 3, .accumulates = "without sync"},
      {.name = "accumulation without reshard", .micro_batches = 3, .accumulates = "without reshard"},
      {.name = "divide factor", .setters = {"divide factor"}, .is_of_one_process = false},
      {.name = "clipped", .max_norm = 0.05},
      {.name = "clipped by the norm 1", .max_norm = 0.5, .norm_type = 1},
  };
}

/// Hybrid meshes need 4 ranks: on 2 they have one shard, or no replicas.
std::vector<Case> cases_of_replicas() {
  std::vector<Case> all{
      {.name = "replicate", .replicates = true},
      {.name = "replicate, accumulation", .replicates = true, .micro_batches = 3, .accumulates = "without sync"},
  };
  if (world_size() == 2) {
    all.push_back({.name = "hybrid of single ranks", .mesh = {2, 1}});
    return all;
  }
  const std::vector<int64_t> grid{2, world_size() / 2};
  const std::vector<Case> hybrid{
      {.name = "hybrid", .mesh = grid},
      {.name = "hybrid, kept after forward", .mesh = grid, .reshard_after_forward = false},
      {.name = "Shard(-1), hybrid", .mesh = grid, .shard_dim = "-1"},
      {.name = "accumulation without all-reduce", .mesh = grid, .micro_batches = 3, .accumulates = "without all-reduce"},
      {.name = "clipped by the largest, hybrid", .mesh = grid, .max_norm = 0.01, .norm_type = INFINITY},
      // On a shard dim of one rank FSDP2 divides by the factor twice.
      {.name = "divide factor, hybrid", .mesh = grid, .setters = {"divide factor"}, .is_of_one_process = false},
  };
  all.insert(all.end(), hybrid.begin(), hybrid.end());
  return all;
}

std::vector<Case> cases_of_where_state_lies() {
  using S = tessera::Strategy;
  return {
      {.name = "zero-1", .micro_batches = 2, .strategy = S::kZero1},
      {.name = "zero-2", .micro_batches = 2, .strategy = S::kZero2},
      {.name = "hierarchical", .mesh = {2, world_size() / 2}, .strategy = S::kHierarchical},
      {.name = "offloaded to the host", .max_norm = 0.05, .offload = Offload::kToHost},
      {.name = "offloaded to files", .max_norm = 0.05, .offload = Offload::kToFiles},
  };
}

std::vector<Case> cases_in_half_precision() {
  std::vector<Case> all{
      {.name = "bf16", .param_dtype = "bf16"},
      {.name = "bf16 reduced in fp32", .param_dtype = "bf16", .reduce_dtype = "fp32"},
      {.name = "fp32 reduced in bf16", .reduce_dtype = "bf16"},
      {.name = "bf16 with fp32 outputs", .param_dtype = "bf16", .reduce_dtype = "fp32", .output_dtype = "fp32"},
      {.name = "bf16 without cast inputs", .param_dtype = "bf16", .reduce_dtype = "fp32", .cast_forward_inputs = false},
      {.name = "bf16, replicate", .param_dtype = "bf16", .reduce_dtype = "fp32", .replicates = true},
      {.name = "bf16, Shard(1), recomputed", .shard_dim = "1", .param_dtype = "bf16", .reduce_dtype = "fp32", .recomputes = true},
      {.name = "fp16 with a scaler", .param_dtype = "fp16", .reduce_dtype = "fp32", .scales = true},
  };
  if (world_size() == 2) return all;
  const std::vector<int64_t> grid{2, world_size() / 2};
  all.push_back({.name = "bf16, hybrid, accumulation",
                 .mesh = grid,
                 .param_dtype = "bf16",
                 .reduce_dtype = "fp32",
                 .micro_batches = 3,
                 .accumulates = "without sync"});
  all.push_back(
      {.name = "fp16 with a scaler, hybrid", .mesh = grid, .param_dtype = "fp16", .reduce_dtype = "fp16", .scales = true});
  return all;
}

/// The defaults, and one of each kind, or all.
std::vector<Case> some_cases() {
  std::vector<Case> some{{.name = "defaults"}};
  for (const auto& kind : {cases_of_parameters(), cases_of_gradients(), cases_of_replicas(), cases_of_where_state_lies(),
                           cases_in_half_precision()}) {
    const auto drawn = sweep(kind, 1);
    some.insert(some.end(), drawn.begin(), drawn.end());
  }
  return some;
}

/// What python_parity.py reads of `test_case`. It has the full sharding, where it has not the strategy.
nlohmann::json for_python(const Case& test_case) {
  nlohmann::json reshard;
  if (const auto& option = test_case.reshard_after_forward)
    reshard = option->ranks() ? nlohmann::json(*option->ranks()) : nlohmann::json(static_cast<bool>(*option));
  return {{"mesh", test_case.strategy ? std::vector<int64_t>{world_size()} : test_case.mesh},
          {"reshard_after_forward", reshard},
          {"shard_dim", test_case.shard_dim},
          {"param_dtype", test_case.param_dtype},
          {"reduce_dtype", test_case.reduce_dtype},
          {"output_dtype", test_case.output_dtype},
          {"cast_forward_inputs", test_case.cast_forward_inputs},
          {"ignored", test_case.ignored},
          {"replicates", test_case.replicates},
          {"micro_batches", test_case.micro_batches},
          {"accumulates", test_case.accumulates},
          {"max_norm", test_case.max_norm},
          {"norm_type", std::isinf(test_case.norm_type) ? "inf" : std::to_string(test_case.norm_type)},
          {"scales", test_case.scales},
          {"offloads", test_case.offload != Offload::kNone},
          {"setters", test_case.setters}};
}

std::vector<nlohmann::json> run_python(const std::vector<Case>& chosen) {
  const TemporaryFolder folder;
  auto all = nlohmann::json::array();
  for (const auto& test_case : chosen) all.push_back(for_python(test_case));
  std::ofstream(folder.file("cases.json")) << all;
  const auto ranks = std::to_string(world_size());
  const auto result =
      run_program({TESSERA_PYTHON, TESSERA_REMEMBERED_SCRIPT, "--key", ranks, "--key", folder.file("cases.json"), "--",
                   TESSERA_PYTHON, TESSERA_PYTHON_PARITY_SCRIPT, ranks, folder.file("store"), folder.file("cases.json")},
                  {}, std::chrono::seconds(600));
  EXPECT_EQ(result.status, 0) << result.output;
  std::vector<nlohmann::json> results;
  std::istringstream lines(result.output);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('{')) results.push_back(nlohmann::json::parse(line));
  }
  return results;
}

/// Of the finite ones. In fp16 a step that overflows has none.
struct Apart {
  Apart(const nlohmann::json& got, const nlohmann::json& expected) {
    for (size_t step = 0; step < kSteps; ++step) {
      const bool finite = expected[step].is_number() && std::isfinite(expected[step].get<double>());
      EXPECT_EQ(finite, got[step].is_number() && std::isfinite(got[step].get<double>())) << "step " << step;
      const double apart = finite ? std::abs(got[step].get<double>() - expected[step].get<double>()) : 0;
      largest = std::isnan(apart) ? INFINITY : std::max(largest, apart);
      mean += apart / static_cast<double>(kSteps);
    }
  }
  double largest = 0, mean = 0;
};

bool computes_in_half(const Case& test_case) {
  return test_case.param_dtype.ends_with("16") || test_case.reduce_dtype.ends_with("16");
}

void compare_to_one_process(const Case& test_case, const nlohmann::json& got) {
  Net net;
  const auto expected = train(net, test_case);
  EXPECT_LE(Apart(got["losses"], expected["losses"]).largest, kFloatBound) << "from one process";
}

/// Nothing tells the end of a forward that is called directly: the root and the last block stay open (docs/limits.md).
nlohmann::json open_without_call(const nlohmann::json& by_call) {
  auto open = by_call.get<std::set<std::string>>();
  open.insert({"", "blocks." + std::to_string(kBlocks - 1)});
  return open;
}

void compare(const Case& test_case, const nlohmann::json& got, const nlohmann::json& python) {
  const bool is_half = computes_in_half(test_case);
  const Apart apart(got["losses"], python["losses"]);
  std::printf("  %-36s at most %.1e from FSDP2, of %.3f\n", test_case.name.c_str(), apart.largest,
              python["losses"].back().get<double>());
  EXPECT_LE(apart.largest, is_half ? kHalfBound : kFloatBound);
  EXPECT_LE(apart.mean, is_half ? kHalfMeanBound : kFloatBound);
  EXPECT_EQ(got["stepped"], python["stepped"]);
  EXPECT_EQ(got["scales"], python["scales"]);
  if (test_case.scales) {
    EXPECT_GE(std::count(got["stepped"].begin(), got["stepped"].end(), false), 2);
    EXPECT_GE(std::count(got["stepped"].begin(), got["stepped"].end(), true), kSteps / 2);
  }
  const bool gathers = !test_case.strategy && !test_case.replicates && test_case.mesh.back() > 1;
  if (!gathers) return;
  EXPECT_EQ(got["open"], python["open"]);
  EXPECT_EQ(got["open without call"], open_without_call(python["open"]));
}

TEST(PythonParity, OfEachArgumentAndStrategy) {
  const auto chosen = some_cases();
  std::vector<std::vector<nlohmann::json>> all;
  for (const auto& test_case : chosen) {
    SCOPED_TRACE(test_case.name);
    all.emplace_back();
    for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter})
      all.back().push_back(train_sharded(test_case, layout));
  }
  if (world_rank() != 0) return;
  const auto python = run_python(chosen);
  ASSERT_EQ(python.size(), chosen.size());
  for (size_t i = 0; i < chosen.size(); ++i) {
    SCOPED_TRACE(chosen[i].name);
    const bool has_rounding_of_fp32 = chosen[i].is_of_one_process && !computes_in_half(chosen[i]);
    for (const auto& got : all[i]) {
      compare(chosen[i], got, python[i]);
      if (has_rounding_of_fp32) compare_to_one_process(chosen[i], got);
    }
  }
}

} // namespace
} // namespace tessera::testing::python_parity_test
