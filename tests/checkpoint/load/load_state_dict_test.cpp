// State dicts in other forms (whole, on the host, on rank 0 alone), and loads from state dicts in memory.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/dtensor/api.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::load_state_dict_test {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using testing::expect_same;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::SharedFolder;
using testing::Training;
using testing::whole_tensor;
using testing::world_rank;
using testing::world_size;

const StateDictOptions kFull{.full_state_dict = true};
const StateDictOptions kRank0{.full_state_dict = true, .cpu_offload = true, .rank0_only = true};
const StateDictOptions kFromRank0{.broadcast_from_rank0 = true};

TEST(StateDictOptions, FullTensorsArePlainCopiesOnEveryRank) {
  for (const auto& strategy : testing::strategies(world_size())) {
    SCOPED_TRACE(strategy);
    Training training(strategy, 1);
    training.step(0);
    const auto full = state_dict(training.model, training.optimizer, kFull);
    expect_same(full, training.state());
    for (const auto& entry : full.entries()) {
      if (!entry.is_tensor()) continue;
      const auto& tensor = std::get<at::Tensor>(entry.content);
      EXPECT_FALSE(is_dtensor(tensor)) << entry.name;
      EXPECT_FALSE(tensor.requires_grad()) << entry.name;
    }
    EXPECT_THAT(full.entries()[2].aliases, ElementsAre("embed.weight"));
    const auto before = full.tensor("embed.weight").clone();
    training.step(1);
    EXPECT_TENSORS_EQUAL(full.tensor("embed.weight"), before);
  }
}

TEST(StateDictOptions, Rank0OnlyLeavesTheOthersEmpty) {
  Training training("full-ragged", 1);
  training.step(0);
  const auto whole = state_dict(training.model, training.optimizer, kFull);
  const auto state = state_dict(training.model, training.optimizer, kRank0);
  EXPECT_EQ(state.size(), world_rank() == 0 ? whole.size() : 0);
  if (world_rank() == 0) { // docs/checkpoints.md, "In memory"
    expect_same(state, whole);
    testing::TrainedModel plain(2);
    const torch::NoGradGuard no_grad;
    for (auto& each : plain.named_parameters()) each.value().copy_(state.tensor(each.key()));
    for (auto& each : plain.named_buffers()) each.value().copy_(state.tensor(each.key()));
    const auto filled = state_dict(plain);
    for (const auto& entry : filled.entries()) EXPECT_TENSORS_EQUAL(filled.tensor(entry.name), whole.tensor(entry.name).cpu());
  }
  EXPECT_EQ(error_of([&] { state_dict(training.model, {.rank0_only = true}); }),
            "state dict: rank0_only needs full_state_dict: without it every rank holds a part");
}

TEST(StateDictOptions, OffloadedPartsAreCopiesThatSaveAndLoadAsTheyAre) {
  const SharedFolder folder;
  Training training("full-ragged", 1), loaded("full-per-parameter", 2);
  const auto state = state_dict(training.model, {.cpu_offload = true});
  const auto before = whole_tensor(training.model.scale).clone();
  EXPECT_EQ(is_dtensor(state.tensor("scale")), is_dtensor(training.model.scale));
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : training.model.parameters()) parameter.fill_(7);
  }
  EXPECT_TENSORS_EQUAL(whole_tensor(state.tensor("scale")), before);
  checkpoint::save(state, folder.path() / "c");
  checkpoint::load(state_dict(loaded.model), folder.path() / "c");
  EXPECT_TENSORS_EQUAL(whole_tensor(loaded.model.scale), before);
}

TEST(StateDictOptions, FrozenParametersAreLeftOutOnRequest) {
  Training training("full-ragged", 1), other("full-ragged", 2);
  EXPECT_TRUE(state_dict(training.model).contains("frozen"));
  const StateDictOptions trained{.ignore_frozen_params = true};
  const auto state = state_dict(training.model, trained);
  EXPECT_FALSE(state.contains("frozen"));
  EXPECT_TRUE(state.contains("shift")); // a buffer
  EXPECT_EQ(state.size(), state_dict(training.model).size() - 1);
  const auto frozen = whole_tensor(other.model.frozen).clone();
  load_state_dict(other.model, state, trained);
  EXPECT_TENSORS_EQUAL(whole_tensor(other.model.frozen), frozen);
  EXPECT_TENSORS_EQUAL(whole_tensor(other.model.scale), whole_tensor(training.model.scale));
  EXPECT_THAT(error_of([&] { load_state_dict(other.model, state); }),
              ::testing::StartsWith("checkpoint: cannot load a state dict: " + testing::all_ranks() +
                                    ": the state dict does not fit:\nmissing in the "));
}

TEST(StateDictOptions, MetaTensorsHaveNoCopy) {
  auto model = on_meta([] { return std::make_shared<testing::TrainedModel>(); });
  EXPECT_THAT(error_of([&] { state_dict(*model, kFull); }),
              ::testing::EndsWith("state dict: \"scale\" is a meta tensor, of which there is no copy"));
}

TEST(LoadStateDict, EveryFormLoadsIntoEveryStrategy) {
  for (const auto& from : testing::strategies(world_size())) {
    for (const auto& to : testing::strategies(world_size())) {
      SCOPED_TRACE(from + " to " + to);
      Training saved(from, 1);
      saved.step(0);
      const auto whole = state_dict(saved.model, saved.optimizer, kFull);
      const auto on_rank0 = state_dict(saved.model, saved.optimizer, kRank0);
      const auto parts = state_dict(saved.model, saved.optimizer, {.cpu_offload = true});
      const auto expected = saved.step(1);
      const auto check = [&](const StateDict& source, const StateDictOptions& options) {
        Training loaded(to, 2);
        const auto keys = load_state_dict(loaded.model, loaded.optimizer, source, options);
        EXPECT_THAT(keys.missing_keys, IsEmpty());
        EXPECT_THAT(keys.unexpected_keys, IsEmpty());
        expect_same(loaded.state(), whole);
        EXPECT_NEAR(loaded.step(1), expected, 1e-5);
      };
      check(whole, {});
      check(on_rank0, kFromRank0);
      check(parts, {});
    }
  }
}

// As after any other write, what autograd saved of the weights can be used no more.
TEST(LoadStateDict, ABackwardOfAForwardBeforeTheLoadIsAnError) {
  const SharedFolder folder;
  auto strategies = testing::strategies_and_layouts();
  strategies.emplace_back("plain");
  for (const auto& strategy : strategies) {
    Training training(strategy, 1), other(strategy, 2);
    const auto whole = state_dict(other.model, kFull), on_rank0 = state_dict(other.model, kRank0);
    checkpoint::save(state_dict(other.model), folder.path() / strategy);
    const auto loss_of = [](Training& each) {
      return each.model.forward(torch::arange(11, each.model.scale.device())).square().mean();
    };
    loss_of(other).backward();
    const std::pair<const char*, std::function<void()>> loads[] = {
        {"load", [&] { checkpoint::load(state_dict(training.model), folder.path() / strategy); }},
        {"of parts", [&] { load_state_dict(training.model, state_dict(other.model)); }},
        {"of whole tensors", [&] { load_state_dict(training.model, whole); }},
        {"from rank 0", [&] { load_state_dict(training.model, on_rank0, kFromRank0); }}};
    for (const auto& [name, load] : loads) {
      SCOPED_TRACE(strategy + ", " + name);
      const auto loss = loss_of(training);
      load();
      EXPECT_THROWS_WITH(loss.backward(), "has been modified by an inplace operation");
      training.optimizer.zero_grad();
      loss_of(training).backward();
      const auto expected = other.model.named_parameters();
      for (const auto& item : training.model.named_parameters()) {
        if (!item.value().requires_grad()) continue;
        EXPECT_TENSORS_CLOSE(whole_tensor(item.value().grad()), whole_tensor(expected[item.key()].grad())) << item.key();
      }
    }
  }
}

TEST(LoadStateDict, MissingUnexpectedAndDifferentNamesAreListedOnEveryRankBeforeAnythingIsWritten) {
  Training saved("full-ragged", 1), target("full-ragged", 2);
  auto state = state_dict(saved.model, kFull);
  state.erase("scale");
  state.erase("shift");
  state.add("extra", torch::ones({2}));
  state.set("step", 3);
  state.erase("frozen");
  state.add("frozen", torch::ones({3, 8}));
  const auto before = state_dict(target.model, kFull);
  const std::string problems =
      "the state dict does not fit:\nmissing in the state dict:\n  scale\n  shift\nunexpected in the state dict:\n  extra\n  "
      "step\n"
      "different in the state dict:\n  frozen: saved as Float[3, 8], to be loaded into Float[3, 7]";
  const auto expected = "checkpoint: cannot load a state dict: " + testing::all_ranks() + ": " + problems;
  EXPECT_EQ(error_of([&] { load_state_dict(target.model, state); }), expected);
  EXPECT_EQ(error_of([&] { load_state_dict(target.model, world_rank() == 0 ? state : StateDict(), kFromRank0); }), expected);
  expect_same(state_dict(target.model, kFull), before);

  const StateDictOptions lenient{.strict = false};
  EXPECT_THAT(error_of([&] { load_state_dict(target.model, state, lenient); }),
              ::testing::EndsWith(testing::all_ranks() + ": the state dict does not fit:\ndifferent in the state dict:\n"
                                                         "  frozen: saved as Float[3, 8], to be loaded into Float[3, 7]"));
  state.erase("frozen");
  const auto keys = load_state_dict(target.model, state, lenient);
  EXPECT_THAT(keys.missing_keys, ElementsAre("scale", "frozen", "shift"));
  EXPECT_THAT(keys.unexpected_keys, ElementsAre("extra", "step"));
  EXPECT_TENSORS_EQUAL(whole_tensor(target.model.scale), before.tensor("scale"));
  EXPECT_TENSORS_EQUAL(whole_tensor(target.model.embed->weight), state.tensor("embed.weight"));
}

TEST(LoadStateDict, DtypesAreConvertedOnRequest) {
  Training target("full-ragged", 2);
  auto saved = std::make_shared<testing::TrainedModel>(1);
  saved->to(at::kBFloat16);
  const auto whole = state_dict(*saved, kFull);
  EXPECT_THAT(error_of([&] { load_state_dict(target.model, whole); }),
              AllOf(HasSubstr("frozen: saved as BFloat16[3, 7], to be loaded into Float[3, 7]"),
                    HasSubstr("\nStateDictOptions::cast converts between dtypes")));
  testing::shard(*saved, "full-ragged");
  const auto parts = state_dict(*saved);
  for (const auto* source : {&whole, &parts}) {
    for (const bool broadcast : {false, true}) {
      if (broadcast && source == &parts) continue;
      Training loaded("full-ragged", 3);
      load_state_dict(loaded.model, *source, {.broadcast_from_rank0 = broadcast, .cast = true});
      for (const auto* name : {"frozen", "embed.weight", "shift"}) {
        const auto values = whole_tensor(state_dict(loaded.model).tensor(name));
        EXPECT_EQ(values.scalar_type(), at::kFloat);
        EXPECT_TENSORS_EQUAL(values.cpu(), whole.tensor(name).to(at::kCPU, at::kFloat));
      }
    }
  }
}

TEST(LoadStateDict, AnErrorOfOneRankIsAnErrorOnAll) {
  Training saved("full-ragged", 1), target("full-ragged", 2);
  auto state = state_dict(saved.model, kFull);
  const int last = world_size() - 1;
  if (world_rank() == last) state.erase("scale");
  EXPECT_EQ(error_of([&] { load_state_dict(target.model, state); }),
            c10::str("checkpoint: cannot load a state dict: rank ", last,
                     ": the state dict does not fit:\nmissing in the state dict:\n  scale"));
  const auto parts = state_dict(saved.model);
  if (world_size() > 1) {
    EXPECT_THAT(error_of([&] { load_state_dict(target.model, parts, kFromRank0); }),
                ::testing::ContainsRegex("rank 0: broadcast_from_rank0 needs whole tensors, and \".*\" is a DTensor"));
    StateDict others;
    if (world_rank() == last) others.add("b", torch::zeros({2}));
    StateDict source;
    source.add("b", torch::ones({2}));
    EXPECT_EQ(error_of([&] { load_state_dict(others, source, {.strict = false, .broadcast_from_rank0 = true}); }),
              c10::str("checkpoint: cannot load a state dict: rank ", last, " would gather or load other tensors than rank 0"));
  }
}

TEST(LoadStateDict, RanksThatWouldGatherDifferentTensorsAreAnErrorOnAll) {
  if (world_size() == 1) GTEST_SKIP() << "one rank cannot differ";
  const auto mesh = init_device_mesh(testing::test_device_type(), {world_size()});
  const auto a = distribute_tensor(torch::full({4}, 1.0), mesh, {Shard{0}}),
             b = distribute_tensor(torch::full({4}, 2.0), mesh, {Shard{0}});
  StateDict source, target;
  source.add(world_rank() == 0 ? "a" : "b", world_rank() == 0 ? a : b);
  for (const auto* name : {"a", "b"}) target.add(name, torch::zeros({4}));
  EXPECT_EQ(error_of([&] { load_state_dict(target, source, {.strict = false}); }),
            "checkpoint: cannot load a state dict: rank 1 would gather or load other tensors than rank 0");
  EXPECT_TENSORS_EQUAL(target.tensor("a"), torch::zeros({4}));
  StateDict own, plain; // whole tensors are not gathered: each rank may load others
  own.add(c10::str("rank", world_rank()), torch::zeros({4}));
  plain.add(c10::str("rank", world_rank()), torch::ones({4}));
  load_state_dict(own, plain);
  EXPECT_TENSORS_EQUAL(own.tensor(c10::str("rank", world_rank())), torch::ones({4}));
}

// Each rank takes its part of its own: no rank would notice that the others read another file.
TEST(LoadStateDict, WholeTensorsThatDifferBetweenRanksAreAnErrorOnAll) {
  if (world_size() == 1) GTEST_SKIP() << "one rank cannot differ";
  Training saved("full-ragged", 1), target("full-ragged", 2);
  const auto before = state_dict(target.model, kFull);
  const auto state = state_dict(saved.model, kFull);
  const auto frozen = state.tensor("frozen").clone();
  const auto last = testing::last_rank();
  if (world_rank() == last) {
    state.tensor("frozen").add_(1);
    state.tensor("shift").add_(1); // a plain tensor may differ
  }
  EXPECT_EQ(error_of([&] { load_state_dict(target.model, state); }),
            c10::str("checkpoint: cannot load a state dict: whole tensors, of which each rank takes its part, differ between "
                     "ranks:\n  frozen on ",
                     DTensor(target.model.frozen).mesh().to_string(), ": rank ", last,
                     " from rank 0\nStateDictOptions::broadcast_from_rank0 gives every rank those of rank 0"));
  expect_same(state_dict(target.model, kFull), before);
  load_state_dict(target.model, state, kFromRank0);
  EXPECT_TENSORS_EQUAL(whole_tensor(target.model.frozen), frozen);
  state.tensor("frozen").copy_(frozen);
  load_state_dict(target.model, state);
  EXPECT_EQ((target.model.shift == saved.model.shift).all().item<bool>(), world_rank() != last);
}

TEST(LoadStateDict, WholeTensorsThatSomeRanksLackAreAnErrorOnAll) {
  if (world_size() == 1) GTEST_SKIP() << "one rank cannot differ";
  Training saved("full-ragged", 1), target("full-ragged", 2);
  const auto before = state_dict(target.model, kFull);
  const auto state = state_dict(saved.model, {.full_state_dict = true, .rank0_only = true});
  EXPECT_EQ(error_of([&] { load_state_dict(target.model, state, {.strict = false}); }),
            "checkpoint: cannot load a state dict: rank 1 would gather or load other tensors than rank 0");
  expect_same(state_dict(target.model, kFull), before);
}

TEST(LoadStateDict, AnEightBitWeightIsNotConvertedWithoutItsScale) {
  StateDict source, target;
  source.add("a", torch::ones({4}).to(torch::kFloat8_e4m3fn));
  source.add("a_scale_inv", torch::full({1}, 2.0));
  target.add("a", torch::zeros({4}));
  EXPECT_THAT(error_of([&] { load_state_dict(target, source, {.strict = false, .cast = true}); }), HasSubstr("\"a_scale_inv\""));
  EXPECT_TENSORS_EQUAL(target.tensor("a"), torch::zeros({4}));
}

// Those of HSDP would train apart from then on.
TEST(LoadStateDict, WholeTensorsThatDifferBetweenReplicasAreAnErrorOnAll) {
  if (world_size() != 4) GTEST_SKIP() << "two replicas of two ranks";
  const auto mesh = init_device_mesh(testing::test_device_type(), {2, 2});
  StateDict source, target;
  source.add("a", torch::full({4}, world_rank() < 2 ? 1.0 : 2.0));
  target.add("a", distribute_tensor(torch::zeros({4}), mesh, {Replicate{}, Shard{0}}));
  EXPECT_THAT(error_of([&] { load_state_dict(target, source); }), HasSubstr(": ranks 2, 3 from rank 0\n"));
  EXPECT_TENSORS_EQUAL(whole_tensor(target.tensor("a")), torch::zeros({4}));
}

TEST(LoadStateDict, AModuleOrOptimizerThatOneRankCannotReadIsAnErrorOnAll) {
  Training training("full-ragged", 1);
  const auto state = state_dict(training.model, training.optimizer, kFull);
  const int last = world_size() - 1;
  auto parameters = training.model.parameters();
  if (world_rank() == last) parameters.push_back(torch::zeros({2}, at::requires_grad()));
  torch::optim::AdamW optimizer(parameters);
  const auto cause = c10::str(": rank ", last, ": ");
  EXPECT_THAT(error_of([&] { load_state_dict(training.model, optimizer, state); }),
              ::testing::StartsWith("checkpoint: cannot load a state dict" + cause));
  EXPECT_THAT(error_of([&] { state_dict(training.model, optimizer, kFull); }),
              ::testing::StartsWith("checkpoint: cannot gather a state dict" + cause));
}

TEST(StateDictOptions, RanksThatWouldGatherDifferentTensorsAreAnErrorOnAll) {
  if (world_size() == 1) GTEST_SKIP() << "one rank cannot differ";
  Training training("full-ragged", 1);
  torch::optim::AdamW fresh(training.model.parameters());
  training.step(0);
  auto& optimizer = world_rank() == 0 ? fresh : training.optimizer; // rank 0's has no state yet
  EXPECT_THAT(
      error_of([&] { state_dict(training.model, optimizer, kFull); }),
      ::testing::MatchesRegex("checkpoint: cannot gather a state dict: rank [0-9] would gather other tensors than rank 0"));
}

TEST(LoadStateDict, TiedTensorsOfTheTargetMustBeEqualInTheSource) {
  StateDict target, source;
  target.add("a", torch::zeros({3}), {"b"});
  source.add("a", torch::ones({3}));
  source.add("b", torch::ones({3}));
  load_state_dict(target, source, kFromRank0);
  EXPECT_TENSORS_EQUAL(target.tensor("b"), torch::ones({3}));
  for (const auto* name : {"a", "b"}) source.tensor(name).fill_(std::numeric_limits<double>::quiet_NaN());
  load_state_dict(target, source, kFromRank0); // a NaN is the same as itself here
  EXPECT_TRUE(target.tensor("b").isnan().all().item<bool>());
  source.tensor("b").fill_(2);
  EXPECT_THAT(
      error_of([&] { load_state_dict(target, source, kFromRank0); }),
      ::testing::EndsWith("rank 0: \"a\" is tied to \"b\", but the state dict holds different values for \"a\" and \"b\""));
}

// The other ranks have gathered what comes after it by then.
TEST(LoadStateDict, TiedTensorsThatDifferOnOneRankAreAnErrorOnAll) {
  if (world_size() == 1) GTEST_SKIP() << "one rank cannot differ";
  const auto mesh = init_device_mesh(testing::test_device_type(), {world_size()});
  const auto last = testing::last_rank();
  StateDict source, target;
  source.add("a", torch::ones({3}));
  source.add("b", torch::full({3}, world_rank() == last ? 2.0 : 1.0));
  for (const auto* name : {"c", "d"}) source.add(name, distribute_tensor(torch::ones({4}), mesh, {Shard{0}}));
  target.add("a", torch::zeros({3}), {"b"});
  target.add("c", torch::zeros({4}), {"d"});
  EXPECT_EQ(error_of([&] { load_state_dict(target, source); }),
            c10::str("checkpoint: cannot load a state dict: rank ", last,
                     ": \"a\" is tied to \"b\", but the state dict holds different values for \"a\" and \"b\""));
  EXPECT_TENSORS_EQUAL(target.tensor("c"), torch::zeros({4}));
}

TEST(LoadStateDict, ALoadThatFailsLeavesTheEntriesOfTheTarget) {
  Training stepped("full-ragged", 1), fresh("full-ragged", 2);
  stepped.step(0);
  auto source = state_dict(stepped.model, stepped.optimizer, kFull);
  auto target = fresh.state();
  const auto entries = target.size();
  source.set("extra", 1);
  EXPECT_THAT(error_of([&] { load_state_dict(target, source); }), HasSubstr("unexpected in the state dict:\n  extra"));
  EXPECT_EQ(target.size(), entries);
  source.erase("extra");
  load_state_dict(target, source);
  EXPECT_GT(target.size(), entries);
  expect_same(target, stepped.state());
}

TEST(LoadStateDict, ValuesAndTensorsOfTheUserTravelToo) {
  StateDict source, target;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{17});
  if (world_rank() == 0) {
    source.add("rng", generator.get_state());
    source.set("step", 12);
    source.set("position", StateValue(std::vector<int64_t>{3, 4}));
    source.set("rate", std::numeric_limits<double>::infinity());
    for (const auto dtype : {at::kBool, at::kBFloat16, at::kComplexDouble, at::kFloat8_e5m2})
      source.add(c10::toString(dtype), torch::ones({2, 3}).to(dtype));
    source.add("scalar", torch::full({}, 5));
    source.add("empty", torch::ones({0, 4}));
    source.add("transposed", torch::arange(6).view({2, 3}).t());
  }
  target.add("rng", torch::zeros_like(generator.get_state()));
  target.set("step", 0);
  target.set("position", StateValue(std::vector<int64_t>{}));
  target.set("rate", 0.0);
  for (const auto dtype : {at::kBool, at::kBFloat16, at::kComplexDouble, at::kFloat8_e5m2})
    target.add(c10::toString(dtype), torch::zeros({2, 3}).to(dtype));
  target.add("scalar", torch::zeros({}, at::kLong));
  target.add("empty", torch::zeros({0, 4}));
  target.add("transposed", torch::zeros({3, 2}, at::kLong));
  load_state_dict(target, source, kFromRank0);
  EXPECT_TENSORS_EQUAL(target.tensor("rng"), generator.get_state());
  EXPECT_EQ(target.value<int64_t>("step"), 12);
  EXPECT_THAT(target.value<std::vector<int64_t>>("position"), ElementsAre(3, 4));
  EXPECT_EQ(target.value<double>("rate"), std::numeric_limits<double>::infinity());
  for (const auto dtype : {at::kBool, at::kBFloat16, at::kFloat8_e5m2})
    EXPECT_TENSORS_EQUAL(target.tensor(c10::toString(dtype)).to(at::kFloat), torch::ones({2, 3}));
  EXPECT_TRUE(torch::equal(target.tensor("ComplexDouble"), torch::ones({2, 3}, at::kComplexDouble)));
  EXPECT_EQ(target.tensor("scalar").item<int64_t>(), 5);
  EXPECT_TENSORS_EQUAL(target.tensor("transposed"), torch::arange(6).view({2, 3}).t());
}

TEST(BroadcastFromRank0, ConjugateAndNegativeViewsTravelAsTheirValues) {
  const auto numbers = torch::arange(3).to(at::kFloat);
  const auto conjugate = torch::complex(numbers, numbers).conj();
  StateDict source, target;
  source.add("conjugate", conjugate);
  source.add("negative", torch::imag(conjugate));
  target.add("conjugate", torch::zeros({3}, at::kComplexFloat));
  target.add("negative", torch::zeros({3}));
  load_state_dict(target, world_rank() == 0 ? source : StateDict(), kFromRank0);
  EXPECT_TRUE(torch::equal(target.tensor("conjugate"), torch::complex(numbers, -numbers)));
  EXPECT_TENSORS_EQUAL(target.tensor("negative"), -numbers);
}

/// Before anything is written, and on all ranks, where only one reads them.
TEST(BroadcastFromRank0, ATensorWithoutReadableValuesIsAnErrorOfAllRanks) {
  for (const bool is_sparse : {false, true}) {
    StateDict target, source;
    for (const auto* name : {"a", "b"}) target.add(name, torch::zeros({2, 2}));
    source.add("a", torch::ones({2, 2}));
    source.add("b", is_sparse ? torch::eye(2).to_sparse() : torch::empty({2, 2}, at::kMeta));
    const auto* expected =
        is_sparse ? "rank 0: \"b\" of the state dict is Sparse" : "rank 0: \"b\" of the state dict is a meta tensor";
    EXPECT_THROWS_WITH(load_state_dict(target, world_rank() == 0 ? source : StateDict(), kFromRank0), expected);
    EXPECT_TENSORS_EQUAL(target.tensor("a"), torch::zeros({2, 2}));
  }
}

TEST(MetaDeviceModel, LoadsOnceItHasMemoryAndReadsOnlyItsPart) {
  const SharedFolder folder;
  Training saved("full-ragged", 1);
  checkpoint::save(state_dict(saved.model), folder.path() / "c");
  const auto full = state_dict(saved.model, kRank0);
  for (const auto& strategy : testing::strategies(world_size())) {
    SCOPED_TRACE(strategy);
    const auto make = [&] {
      auto model = on_meta([] { return std::make_shared<testing::TrainedModel>(); });
      testing::shard(*model, strategy);
      return model;
    };
    auto model = make();
    const std::string error = "a meta tensor has no data; allocate it first (tessera::materialize)";
    EXPECT_THROWS_WITH(checkpoint::load(state_dict(*model), folder.path() / "c"), error);
    EXPECT_THROWS_WITH(load_state_dict(*model, full, kFromRank0), error);
    if (strategy == "plain") continue; // materialize is for sharded models
    materialize(*model, [](torch::nn::Module&) {});
    checkpoint::LoadOptions unverified;
    unverified.verify = false;
    const auto report = checkpoint::load(state_dict(*model), folder.path() / "c", unverified);
    expect_same(state_dict(*model, kFull), state_dict(saved.model, kFull));
    int64_t own_bytes = 0;
    const auto own = state_dict(*model);
    for (const auto& entry : own.entries()) {
      const auto& tensor = std::get<at::Tensor>(entry.content);
      own_bytes += static_cast<int64_t>((is_dtensor(tensor) ? DTensor(tensor).local() : tensor).nbytes());
    }
    EXPECT_EQ(report.bytes_read, own_bytes);
    auto again = make();
    materialize(*again, [](torch::nn::Module&) {});
    load_state_dict(*again, full, kFromRank0);
    expect_same(state_dict(*again, kFull), state_dict(saved.model, kFull));
  }
}

TEST(FlattenedOptimizer, OptionsAreNamedByParameterAndFitOtherGroups) {
  const SharedFolder folder;
  Training saved("full-ragged", 1);
  saved.step(0);
  const auto flat = state_dict(saved.model, saved.optimizer, {.flatten_optimizer_state_dict = true});
  EXPECT_EQ(flat.value<double>("optimizer.param_groups.blocks.0.1.weight.lr"), 0.05);
  EXPECT_EQ(flat.value<bool>("optimizer.param_groups.scale.amsgrad"), true);
  EXPECT_FALSE(flat.contains("optimizer.param_groups.0.lr"));
  EXPECT_FALSE(flat.contains("optimizer.param_groups.0.params"));
  checkpoint::save(flat, folder.path() / "flat");
  checkpoint::save(saved.state(), folder.path() / "grouped");

  testing::TrainedModel model(2);
  const auto all = Training::parameters_of(model);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>(all.begin(), all.begin() + 2));
  groups.emplace_back(std::vector<at::Tensor>(all.begin() + 2, all.end()));
  torch::optim::AdamW split(groups, torch::optim::AdamWOptions(1.0));
  checkpoint::load(state_dict(model, split), folder.path() / "flat");
  for (const auto& group : split.param_groups()) EXPECT_EQ(group.options().get_lr(), 0.05);
  const auto loaded = state_dict(model, split, {.flatten_optimizer_state_dict = true});
  expect_same(loaded, flat);
  EXPECT_THROWS_WITH(checkpoint::load(state_dict(model, split), folder.path() / "grouped"),
                     "the checkpoint holds an optimizer with 1 parameter groups, and here are 2");

  // Either form loads where the other is asked for.
  Training same("full-per-parameter", 3);
  checkpoint::load(state_dict(same.model, same.optimizer, {.flatten_optimizer_state_dict = true}), folder.path() / "grouped");
  expect_same(same.state(), saved.state());
  Training again("full-per-parameter", 4);
  load_state_dict(again.model, again.optimizer, flat);
  expect_same(again.state(), saved.state());

  // One group cannot have two learning rates.
  auto uneven = state_dict(saved.model, saved.optimizer, {.full_state_dict = true, .flatten_optimizer_state_dict = true});
  uneven.set("optimizer.param_groups.scale.lr", 0.5);
  EXPECT_THROWS_WITH(load_state_dict(again.model, again.optimizer, uneven),
                     "parameter group 0 has one lr, and the checkpoint holds different ones for \"scale\" and ");
}

} // namespace
} // namespace tessera::load_state_dict_test
