// Models whose parameters change after fully_shard.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/fsdp/call.h>
#include <tessera/fsdp/explain.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/reshard_parameters.h>
#include <tessera/fsdp/summary.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/optim/shard_optimizer.h>

#include <tessera/tests/fsdp/gradient_settings.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::reshard_parameters_test {
namespace {

using torch::Tensor;

/// A linear layer to which an adapter is added later, or whose weight is replaced.
struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl(int64_t in, int64_t out) : base(register_module("base", torch::nn::Linear(in, out))) {}
  Tensor forward(const Tensor& x) {
    const auto y = base(x);
    return down.defined() ? y + torch::linear(torch::linear(x, down), up) : y;
  }
  void add_adapter(c10::Device device = torch::kCPU) {
    const auto make = [&](std::vector<int64_t> sizes) {
      return torch::arange(sizes[0] * sizes[1], torch::kFloat).view(sizes).mul(0.01).to(device);
    };
    down = register_parameter("down", make({2, base->weight.size(1)}));
    up = register_parameter("up", make({base->weight.size(0), 2}));
  }
  torch::nn::Linear base;
  Tensor down, up;
};
TORCH_MODULE(Adapted);

struct TowerImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return head(torch::tanh(second(torch::tanh(first(x))))) * scale; }
  Adapted first{register_module("first", Adapted(5, 7))}, second{register_module("second", Adapted(7, 3))};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(3, 2))};
  Tensor scale = register_parameter("scale", torch::tensor(1.5));
  Tensor table = register_buffer("table", torch::ones({3}));
  void look(const Tensor& x, at::ScalarType* seen) { *seen = x.scalar_type(); }
  void replace_head(int64_t outputs) {
    torch::manual_seed(9);
    head = replace_module("head", torch::nn::Linear(3, outputs));
  }
};
TORCH_MODULE(Tower);

Tower make_tower() {
  torch::manual_seed(3);
  return Tower();
}

void shard_tower(Tower& tower, const Strategy& strategy) {
  const auto mesh = strategy.mesh();
  const auto wrap = [&](torch::nn::Module& module) {
    strategy.replicates ? replicate(module, mesh, strategy.options) : fully_shard(module, mesh, strategy.options);
  };
  wrap(*tower->first);
  wrap(*tower->second);
  wrap(*tower);
}

Tensor rows_of(int64_t step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
  return torch::randn({12, 5}, generator, torch::kFloat);
}

void step(Tower& tower, torch::optim::Optimizer& optimizer, const Tensor& rows) {
  optimizer.zero_grad();
  tower->forward(rows.to(tower->scale.scalar_type())).square().mean().backward();
  optimizer.step();
  optimizer.zero_grad();
}

Tensor mine(const Tensor& rows) { return part_of(rows, world_rank(), world_size()).to(test_device()); }

using Change = std::pair<std::string, std::function<void(Tower&)>>;

std::vector<Change> changes() {
  return {{"nothing", [](Tower&) {}},
          {"adapter", [](Tower& tower) { tower->first->add_adapter(); }},
          {"adapters on a frozen base",
           [](Tower& tower) {
             for (auto& parameter : tower->parameters()) parameter.requires_grad_(false);
             tower->first->add_adapter();
             tower->second->add_adapter();
           }},
          {"another head", [](Tower& tower) { tower->replace_head(2); }},
          {"a head of another shape", [](Tower& tower) { tower->replace_head(6); }},
          {"another weight in the same place", [](Tower& tower) {
             tower->second->base =
                 tower->second->replace_module("base", torch::nn::Linear(torch::nn::LinearOptions(7, 3).bias(false)));
             const torch::NoGradGuard no_grad;
             tower->second->base->weight.fill_(0.25);
           }}};
}

std::vector<std::pair<Change, Strategy>> all_changes() {
  std::vector<std::pair<Change, Strategy>> all;
  const FullyShardOptions in_files{.offload = offload_to_files(std::filesystem::temp_directory_path())};
  for (const auto& change : changes()) {
    for (const auto& strategy : strategies()) all.emplace_back(change, strategy);
    all.emplace_back(change, Strategy{"in files", world_mesh, in_files});
  }
  return all;
}

/// A change under the default strategy, and others of all.
std::vector<std::pair<Change, Strategy>> some_changes(size_t count) {
  if (full_run()) return all_changes();
  auto some = sweep(all_changes(), count - 1);
  some.emplace_back(sweep(changes(), 1).front(), strategies().front());
  return some;
}

/// Steps, changes, and steps again with an optimizer of the changed model.
TEST(ReshardParameters, AChangedModelTrainsAsTheUnshardedOne) {
  for (const auto& [change, strategy] : some_changes(3)) {
    SCOPED_TRACE(change.first + ", " + strategy.name);
    auto tower = make_tower(), plain = make_tower();
    shard_tower(tower, strategy);
    const auto handle = fsdp(*tower->first);
    for (auto* each : {&tower, &plain}) {
      torch::optim::AdamW first((*each)->parameters(), 1e-2);
      step(*each, first, each == &tower ? mine(rows_of(0)) : rows_of(0));
      change.second(*each);
      if (each == &tower) reshard_parameters(tower);
      torch::optim::AdamW second((*each)->parameters(), 1e-2);
      for (int64_t i = 1; i < 4; ++i) step(*each, second, each == &tower ? mine(rows_of(i)) : rows_of(i));
    }
    EXPECT_LE(parameter_difference(*tower, *plain), 1e-4);
    for (const auto& parameter : tower->parameters()) EXPECT_TRUE(is_dtensor(parameter));
    EXPECT_EQ(handle.parameter_names(), fsdp(*tower->first).parameter_names());
  }
}

TEST(ReshardParameters, MakesWhatFullyShardWouldHaveMade) {
  for (const auto& [change, strategy] : some_changes(2)) {
    SCOPED_TRACE(change.first + ", " + strategy.name);
    auto tower = make_tower(), fresh = make_tower();
    shard_tower(tower, strategy);
    change.second(tower);
    reshard_parameters(*tower);
    change.second(fresh);
    shard_tower(fresh, strategy);
    const auto expected = fresh->named_parameters();
    for (const auto& item : tower->named_parameters()) {
      const auto& other = expected[item.key()];
      EXPECT_EQ(DTensor(item.value()).placements(), DTensor(other).placements()) << item.key();
      EXPECT_TENSORS_EQUAL(DTensor(item.value()).local(), DTensor(other).local());
    }
    EXPECT_EQ(fsdp(*tower).parameter_names(), fsdp(*fresh).parameter_names());
  }
}

TEST(ReshardParameters, SaysWhatItDid) {
  auto tower = make_tower();
  shard_tower(tower, {"full"});
  tower->first->add_adapter();
  tower->replace_head(6);
  const auto done = reshard_parameters(tower);
  using ::testing::IsEmpty;
  EXPECT_THAT(done.added, ::testing::UnorderedElementsAre("first.down", "first.up", "head.weight", "head.bias"));
  EXPECT_THAT(done.removed, ::testing::UnorderedElementsAre("head.weight", "head.bias"));
  if (world_size() > 1) EXPECT_THAT(done.moved, ::testing::Contains("first.base.weight"));
  EXPECT_THAT(done.moved, ::testing::Not(::testing::Contains("second.base.weight")));
  EXPECT_THAT(reshard_parameters(tower).moved, IsEmpty());
  EXPECT_THAT(summary(*tower).to_string(), ::testing::HasSubstr("first"));
}

/// Without its head until `give_head`. What was freed may be where the new one lies.
void take_head(Tower& tower) {
  tower->unregister_module("head");
  tower->head = nullptr;
}

void give_head(Tower& tower) {
  torch::manual_seed(9);
  tower->head = tower->register_module("head", torch::nn::Linear(3, 2));
}

Tower tower_whose_head_is_a_group_in_bf16() {
  auto tower = make_tower();
  fully_shard(*tower->head, world_mesh(), {.mixed_precision = {.param_dtype = torch::kBFloat16}});
  fully_shard(*tower, world_mesh());
  return tower;
}

TEST(ReshardParameters, AModuleInPlaceOfAShardedOneHasTheOptionsOfTheOneAbove) {
  for (int repeat = 0; repeat < 4; ++repeat) {
    auto tower = tower_whose_head_is_a_group_in_bf16();
    take_head(tower);
    give_head(tower);
    const auto done = reshard_parameters(tower);
    EXPECT_THAT(done.added, ::testing::UnorderedElementsAre("head.weight", "head.bias"));
    EXPECT_THAT(done.removed, ::testing::UnorderedElementsAre("head.weight", "head.bias"));
    EXPECT_FALSE(is_sharded(*tower->head));
    EXPECT_EQ(tower->head(torch::ones({2, 3}, test_device())).scalar_type(), torch::kFloat);
    EXPECT_TRUE(reshard_parameters(tower).removed.empty());
  }
}

TEST(ReshardParameters, AModuleInPlaceOfAGoneOneCanBeShardedByItself) {
  for (int repeat = 0; repeat < 4; ++repeat) {
    auto tower = tower_whose_head_is_a_group_in_bf16();
    take_head(tower);
    give_head(tower);
    fully_shard(*tower->head, world_mesh());
    EXPECT_TRUE(is_sharded(*tower->head));
  }
}

struct GainImpl : torch::nn::Module {
  GainImpl() { renew(); }
  void renew() {
    if (gain.defined()) parameters_.erase("gain");
    gain = register_parameter("gain", torch::ones({3}));
  }
  Tensor gain;
};
TORCH_MODULE(Gain);

TEST(ReshardParameters, AModuleKeepsItsOptionsWhenAllItsParametersAreNew) {
  torch::manual_seed(0);
  struct Holder : torch::nn::Module {
    Gain gain = register_module("gain", Gain());
    torch::nn::Linear head = register_module("head", torch::nn::Linear(3, 2));
  } holder;
  fully_shard(*holder.gain, world_mesh(), {.mixed_precision = {.param_dtype = torch::kBFloat16}});
  fully_shard(holder, world_mesh());
  holder.gain->renew();
  const auto done = reshard_parameters(holder);
  EXPECT_THAT(done.added, ::testing::ElementsAre("gain.gain"));
  EXPECT_THAT(done.removed, ::testing::ElementsAre("gain.gain"));
  EXPECT_TRUE(is_sharded(*holder.gain));
  EXPECT_EQ((holder.gain->gain * torch::ones({3}, test_device())).scalar_type(), torch::kBFloat16);
}

TEST(ReshardParameters, AModelWhoseParametersAreAllNewIsShardedAgain) {
  Gain gain;
  auto handle = fully_shard(*gain, world_mesh());
  gain->renew();
  EXPECT_THROWS_WITH(reshard_parameters(gain), "call fully_shard on it, also where all parameters that it sharded were replaced");
  fully_shard(*gain, world_mesh());
  (gain->gain * torch::ones({3}, test_device())).sum().backward();
  EXPECT_TENSORS_EQUAL(full(gain->gain.grad()), torch::ones({3}));
}

TEST(ReshardParameters, CostsACollectiveWhereNothingChanged) {
  auto tower = make_tower();
  shard_tower(tower, {"full"});
  process_context().reset_counters();
  reshard_parameters(tower);
  EXPECT_LE(process_context().count(CollectiveKind::kAllGather).calls, 1);
}

TEST(ReshardParameters, ChangesTheDtype) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    auto tower = make_tower(), plain = make_tower();
    shard_tower(tower, strategy);
    for (auto* each : {&tower, &plain}) {
      torch::optim::SGD first((*each)->parameters(), 0.1);
      step(*each, first, each == &tower ? mine(rows_of(0)) : rows_of(0));
      each == &tower ? void(reshard_parameters(tower, {.dtype = torch::kDouble})) : (*each)->to(torch::kDouble);
      torch::optim::SGD second((*each)->parameters(), 0.1);
      for (int64_t i = 1; i < 3; ++i) step(*each, second, each == &tower ? mine(rows_of(i)) : rows_of(i));
    }
    EXPECT_EQ(tower->table.scalar_type(), torch::kDouble);
    for (const auto& parameter : tower->parameters()) EXPECT_EQ(parameter.scalar_type(), torch::kDouble);
    EXPECT_LE(parameter_difference(*tower, *plain), 1e-6); // the first step was in float
  }
}

TEST(ReshardParameters, AnOptimizerOfBeforeGoesOn) {
  for (const bool moves_state : {true, false}) { // otherwise the state is moved in each step
    for (const auto& strategy : sweep(strategies(), 5, is_default)) {
      SCOPED_TRACE(strategy.name);
      auto tower = make_tower(), plain = make_tower();
      shard_tower(tower, strategy);
      torch::optim::AdamW ours(tower->parameters(), 1e-2), theirs(plain->parameters(), 1e-2);
      for (int64_t i = 0; i < 4; ++i) {
        step(tower, ours, mine(rows_of(i)));
        step(plain, theirs, rows_of(i));
        if (i != 1) continue;
        tower->first->add_adapter();
        plain->first->add_adapter();
        reshard_parameters(tower);
        ours.add_param_group(torch::optim::OptimizerParamGroup(tower->first->parameters(false)));
        theirs.add_param_group(torch::optim::OptimizerParamGroup(plain->first->parameters(false)));
        if (moves_state) shard_optimizer(ours);
      }
      EXPECT_LE(parameter_difference(*tower, *plain), 1e-4);
    }
  }
}

TEST(ReshardParameters, KeepsTheSettingsOfAModule) {
  auto tower = make_tower();
  shard_tower(tower, {"full"});
  fsdp(*tower->first).set_gradient_divide_factor(4);
  int64_t hooked = 0;
  fsdp(*tower->first).set_all_reduce_hook([&](const Tensor&) { ++hooked; });
  fsdp(*tower->second).set_modules_to_backward_prefetch({fsdp(*tower->first)});
  tower->first->add_adapter();
  reshard_parameters(tower);
  tower->forward(mine(rows_of(0))).sum().backward();
  EXPECT_EQ(hooked, 1);
  auto plain = make_tower();
  plain->first->add_adapter();
  plain->forward(rows_of(0)).sum().backward();
  EXPECT_TENSORS_CLOSE(full(tower->first->down.grad()), plain->first->down.grad() / 4, 1e-4, 1e-6);
  EXPECT_TENSORS_CLOSE(full(tower->second->base->weight.grad()), plain->second->base->weight.grad() / world_size(), 1e-4, 1e-6);
}

TEST(ReshardParameters, GoesOnReporting) {
  auto tower = make_tower();
  shard_tower(tower, {"full"});
  fsdp(*tower).set_reporting(true);
  tower->first->add_adapter();
  reshard_parameters(tower);
  tower->forward(mine(rows_of(0))).sum().backward();
  EXPECT_EQ(fsdp(*tower).report().all_gathers().calls > 0, world_size() > 1);
  tower->zero_grad();
  fsdp(*tower).set_reporting(false);
  tower->second->add_adapter();
  reshard_parameters(tower);
  EXPECT_THROWS_WITH(fsdp(*tower).report(), "nothing was recorded");
}

TEST(ReshardParameters, AModuleThatHadNoParametersHasItsOptionsAndTheSettingsOfTheOneAbove) {
  auto tower = make_tower();
  FullyShardOptions options;
  if (world_size() == 4) options.reshard_after_forward = 2;
  fully_shard(*tower->first->base, world_mesh());
  fully_shard(*tower->first, world_mesh(), options);
  fully_shard(*tower, world_mesh());
  fsdp(*tower).set_requires_gradient_sync(false);
  fsdp(*tower).set_reduce_scatter_max_input_buffers(1);
  tower->first->add_adapter();
  reshard_parameters(tower);
  const auto state = fsdp(*tower->first).state();
  ASSERT_THAT(fsdp(*tower->first).parameter_names(), ::testing::ElementsAre("first.down", "first.up"));
  EXPECT_EQ(state->group()->stages().has_after_forward(), world_size() == 4);
  const auto settings = settings_of(fsdp(*tower->first));
  EXPECT_FALSE(settings.sync());
  EXPECT_FALSE(settings.all_reduce());
  EXPECT_TRUE(settings.has_only_buffer);
  fsdp(*tower).set_requires_gradient_sync(true);
  tower->forward(mine(rows_of(0))).sum().backward();
  EXPECT_TRUE(tower->first->down.grad().defined());
}

TEST(ReshardParameters, LeavesIgnoredParametersAsTheyAre) {
  auto tower = make_tower();
  fully_shard(*tower->first, world_mesh(), {.ignored_params = {tower->first->base->bias}});
  fully_shard(tower, world_mesh(), {.ignored_params = {tower->first->base->bias}});
  tower->first->add_adapter();
  reshard_parameters(*tower, {.dtype = torch::kDouble, .ignored_params = {tower->first->up}});
  EXPECT_FALSE(is_dtensor(tower->first->base->bias));
  EXPECT_FALSE(is_dtensor(tower->first->up));
  EXPECT_EQ(tower->first->up.scalar_type(), torch::kFloat);
  EXPECT_TRUE(is_dtensor(tower->first->down));
}

TEST(ReshardParameters, AReplacedParameterThatAnOptimizerHoldsIsADTensorByItself) {
  auto tower = make_tower();
  shard_tower(tower, {"full"});
  const auto old = tower->head->weight;
  const auto value = full(old);
  tower->replace_head(2);
  reshard_parameters(tower);
  EXPECT_TENSORS_EQUAL(full(old), value);
  tower->forward(mine(rows_of(0))).sum().backward();
  EXPECT_FALSE(old.grad().defined());
  EXPECT_TRUE(tower->head->weight.grad().defined());
}

TEST(ReshardParameters, SaysWhatIsWrong) {
  auto tower = make_tower();
  EXPECT_THROWS_WITH(reshard_parameters(tower), "is not sharded: call fully_shard on it");
  shard_tower(tower, {"full"});
  EXPECT_THROWS_WITH(reshard_parameters(*tower->first), "is a part of the model tessera::testing::");
  EXPECT_THROWS_WITH(reshard_parameters(tower, {.dtype = torch::kInt}), "the dtype Int is no floating-point one");
  tower->first->add_adapter(test_device());
  EXPECT_THROWS_WITH(tower->forward(mine(rows_of(0))), "tessera::reshard_parameters shards what was added");
  for (auto& parameter : tower->first->parameters(false)) parameter.requires_grad_(false);
  tower->forward(mine(rows_of(0))).sum().backward();
  EXPECT_THROWS_WITH(reshard_parameters(tower), "the parameter first.base.weight has a gradient");
  tower->zero_grad();
  fsdp(*tower).set_requires_gradient_sync(false);
  const auto stale = tower->forward(mine(rows_of(0))).sum();
  tower->forward(mine(rows_of(0))).sum().backward();
  if (world_size() > 1) EXPECT_THROWS_WITH(reshard_parameters(tower), "wait for their reduction");
  fsdp(*tower).set_requires_gradient_sync(true);
  tower->forward(mine(rows_of(0))).sum().backward();
  tower->zero_grad();
  reshard_parameters(tower);
  EXPECT_THROWS_WITH(stale.backward(), " comes from a forward that ran before reshard_parameters: run it again");
  tower->forward(mine(rows_of(0))).sum().backward();
  EXPECT_TRUE(tower->first->base->weight.grad().defined());
  EXPECT_THROWS_WITH(tower->to(torch::kDouble), "tessera::reshard_parameters(module, {.dtype = ...})");
}

TEST(ReshardParameters, RanksThatChangedOtherThingsAreAnErrorOnAll) {
  if (world_size() == 1) return;
  auto tower = make_tower();
  shard_tower(tower, {"full"});
  if (world_rank() == 0) tower->first->add_adapter();
  EXPECT_THROWS_WITH(reshard_parameters(tower), "reshard_parameters of tessera::testing::");
}

TEST(ReshardParameters, RanksThatRemovedOtherGroupsAreAnErrorOnAll) {
  if (world_size() == 1) return;
  auto tower = tower_whose_head_is_a_group_in_bf16();
  if (world_rank() == 0) take_head(tower);
  EXPECT_THROWS_WITH(reshard_parameters(tower), "the ranks' models or options differ");
}

TEST(ReshardParameters, AnUnshardedParameterFromBeforeIsAnError) {
  if (world_size() == 1) return; // where it is the parameter's own memory
  auto tower = make_tower();
  shard_tower(tower, {"full"});
  const auto row = tower->first->base->weight[0];
  tower->first->add_adapter();
  reshard_parameters(tower);
  EXPECT_THROWS_WITH(row + 1, "tessera::reshard_parameters made another group since the forward that read it");
}

/// The disk is gone when the second memory is made: some groups could be new, and others not.
TEST(ReshardParameters, AfterAFailureAmidItsChangesEachReadSaysSo) {
  auto tower = make_tower();
  std::optional<TemporaryFolder> folder(std::in_place);
  shard_tower(tower, {"in files", world_mesh, {.offload = offload_to_files(folder->path())}});
  const auto x = rows_of(0).to(test_device());
  const torch::NoGradGuard no_grad;
  const auto before = tower->forward(x);
  tower->second->add_adapter(test_device());
  folder.reset();
  EXPECT_THROWS_WITH(reshard_parameters(tower), "offload: cannot make a file");
  EXPECT_THROWS_WITH(tower->forward(x),
                     "the model cannot be used any more, because reshard_parameters failed amid its changes: ");
}

/// The head that had no memory yet is gone when the rest gets some.
TEST(ReshardParameters, AModelThatChangedOnTheMetaDeviceIsMaterializedFirst) {
  auto tower = on_meta([] { return Tower(); });
  fully_shard(*tower->first, world_mesh());
  fully_shard(*tower, world_mesh());
  tower->replace_head(4);
  EXPECT_THROWS_WITH(reshard_parameters(tower), "call tessera::materialize first");
  materialize(*tower, [](torch::nn::Module&) {});
  EXPECT_FALSE(Tensor().defined() || Tensor().key_set().has(c10::DispatchKey::Fake));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : tower->parameters()) is_dtensor(parameter) ? void(parameter.fill_(1)) : void();
  reshard_parameters(tower);
  for (const auto& parameter : tower->parameters()) EXPECT_TRUE(is_dtensor(parameter));
  EXPECT_EQ(tower->forward(rows_of(0).to(test_device())).size(1), 4);
}

/// The root's own parameters were all kept in fp32 when it was sharded.
TEST(ReshardParameters, WhatIsAddedIsReadInTheDtypeOfThePolicy) {
  auto tower = make_tower();
  FullyShardOptions options;
  options.mixed_precision.param_dtype = torch::kBFloat16;
  options.mixed_precision.keep_in_fp32 = {"scale"};
  for (auto* below : std::vector<torch::nn::Module*>{&*tower->first, &*tower->second, &*tower->head})
    fully_shard(*below, world_mesh(), options);
  fully_shard(*tower, world_mesh(), options);
  const auto dtype_in = [&] {
    at::ScalarType seen = at::kDouble;
    tessera::call(tower.ptr(), &TowerImpl::look, rows_of(0).to(test_device()), &seen);
    return seen;
  };
  EXPECT_EQ(dtype_in(), at::kFloat);
  const auto added = tower->register_module("added", torch::nn::Linear(2, 2));
  reshard_parameters(tower);
  EXPECT_EQ(unsharded(added->weight).scalar_type(), at::kBFloat16);
  EXPECT_EQ(unsharded(tower->scale).scalar_type(), at::kFloat);
  EXPECT_EQ(dtype_in(), at::kBFloat16);
}

TEST(ReshardParameters, ANormThatCannotMixTheNewDtypesIsNamedBeforeAnyChange) {
  const auto make = [](const std::vector<std::string>& keep, at::ScalarType statistics) {
    torch::manual_seed(0);
    torch::nn::Sequential net(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4));
    for (auto& buffer : net->buffers()) {
      if (buffer.is_floating_point()) buffer.set_data(buffer.to(statistics));
    }
    fully_shard(*net, world_mesh(), {.mixed_precision = {.param_dtype = torch::kBFloat16, .keep_in_fp32 = keep}});
    return net;
  };
  auto kept = make({"BatchNorm1d"}, torch::kFloat);
  EXPECT_THROWS_WITH(reshard_parameters(*kept, {.dtype = torch::kBFloat16}),
                     "the norm 1 (BatchNorm1d) would compute with its weight in Float beside running statistics in BFloat16");
  for (const auto& parameter : kept->parameters()) EXPECT_EQ(parameter.scalar_type(), torch::kFloat);
  EXPECT_EQ(kept->named_buffers()["1.running_mean"].scalar_type(), torch::kFloat);
  for (int step = 0; step < 2; ++step) kept->forward(rows_of(0).to(test_device()));
  auto unchanged = make({}, torch::kBFloat16);
  EXPECT_THROWS_WITH(reshard_parameters(*unchanged, {.dtype = torch::kFloat}),
                     "would compute with its weight in BFloat16 beside running statistics in Float");
}

TEST(ReshardParameters, AnotherDtypeMakesBucketsOfItsBytes) {
  const auto groups_of = [](bool in_half_first) {
    torch::manual_seed(0);
    torch::nn::ModuleList layers;
    for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(8, 8));
    if (in_half_first) layers->to(torch::kBFloat16);
    replicate(*layers, world_mesh(), {.bucket_bytes = 600});
    if (in_half_first) reshard_parameters(*layers, {.dtype = torch::kFloat});
    return explain(*layers).groups.size();
  };
  EXPECT_EQ(groups_of(true), groups_of(false));
}

TEST(ReshardParameters, ARenamedModuleIsNoChange) {
  auto tower = make_tower();
  fully_shard(*tower, world_mesh());
  tower->unregister_module("head");
  tower->register_module("top", tower->head);
  for (int call = 0; call < 3; ++call) {
    const auto changed = reshard_parameters(tower);
    EXPECT_THAT(changed.removed, ::testing::IsEmpty());
    EXPECT_THAT(changed.added, ::testing::IsEmpty());
  }
}

} // namespace
} // namespace tessera::testing::reshard_parameters_test
