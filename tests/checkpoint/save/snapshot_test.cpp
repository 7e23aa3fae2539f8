// Tensors whose memory does not stand for what their name says: views that are copies, parts of different meshes, other ranks
// gone.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/fsdp/clip_grad.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/line_mesh.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::checkpoint::snapshot_test {
namespace {

using at::Tensor;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::line_mesh;
using testing::SharedFolder;
using testing::whole_tensor;
using testing::world_rank;
using testing::world_size;

StateDict state_of(const std::string& name, const Tensor& tensor) {
  StateDict state;
  state.add(name, tensor);
  return state;
}

// A base and a view of its elements 4 … 8; the view is a copy where that moves data between ranks.
struct ViewedBase {
  explicit ViewedBase(const Tensor& values)
      : base(Tensor(distribute_tensor(values, line_mesh(), {StridedShard{0, 2}}))), view(base.slice(0, 4, 9)) {}
  bool is_copy() const { return internal::dtensor_meta(view)->copied_at_version.has_value(); }
  Tensor base, view;
};

struct Use {
  std::string name;
  std::function<void(StateDict& state, const std::filesystem::path& folder)> run;
};

TEST(ViewsThatAreCopies, CannotBeLoadedInto) {
  const SharedFolder folder;
  const auto values = torch::arange(4, 9, at::kDouble);
  save(state_of("v", values), folder.path() / "c");
  const std::vector<Use> uses{
      {"load", [](StateDict& state, const auto& path) { load(state, path / "c"); }},
      {"load_state_dict", [&](StateDict& state, const auto&) { load_state_dict(state, state_of("v", values)); }},
      {"load_state_dict from rank 0",
       [&](StateDict& state, const auto&) { load_state_dict(state, state_of("v", values), {.broadcast_from_rank0 = true}); }}};
  for (const auto& use : uses) {
    SCOPED_TRACE(use.name);
    const ViewedBase target(torch::zeros({10}, at::kDouble));
    auto state = state_of("v", target.view);
    const auto error = error_of([&] { use.run(state, folder.path()); });
    if (target.is_copy()) {
      EXPECT_THAT(error, AllOf(HasSubstr(c10::str(testing::all_ranks(),
                                                  ": checkpoint: tensor \"v\": load: this view of a DTensor could "
                                                  "not alias it, because its data had to move between ranks")),
                               HasSubstr("writing into it would not reach the original")));
    } else {
      EXPECT_EQ(error, "no error");
    }
    EXPECT_EQ(whole_tensor(target.base).sum().item<double>(), target.is_copy() ? 0 : 30);
  }
}

TEST(ViewsThatAreCopies, CannotBeSavedAfterTheirBaseWasWritten) {
  const SharedFolder folder;
  const std::vector<Use> uses{
      {"save", [](StateDict& state, const auto& path) { save(state, path / "save"); }},
      {"Checkpointer",
       [](StateDict& state, const auto& path) {
         Checkpointer checkpointer;
         checkpointer.save(state, path / "background");
         checkpointer.wait();
       }},
      {"save_hugging_face", [](StateDict& state, const auto& path) { save_hugging_face(state, path / "hf"); }},
      {"load_state_dict",
       [](StateDict& state, const auto&) {
         auto target = state_of("v", torch::zeros({5}, at::kDouble));
         load_state_dict(target, state);
       }},
      {"load_state_dict into the same layout", [](StateDict& state, const auto&) {
         const auto* meta = internal::dtensor_meta(state.tensor("v"));
         auto target = state_of("v", internal::make_dtensor(torch::zeros_like(meta->local), meta->spec));
         load_state_dict(target, state);
       }}};
  for (const auto& use : uses) {
    SCOPED_TRACE(use.name);
    const ViewedBase source(torch::arange(10, at::kDouble));
    auto state = state_of("v", source.view);
    use.run(state, folder.path() / "fresh");
    source.base.add_(100);
    const auto error = error_of([&] { use.run(state, folder.path()); });
    if (source.is_copy()) {
      EXPECT_THAT(error, HasSubstr(c10::str(testing::all_ranks(),
                                            ": checkpoint: tensor \"v\": save: the DTensor behind this view was "
                                            "written after the view was taken")));
    } else {
      EXPECT_EQ(error, "no error");
    }
  }
}

// A stage of a pipeline: as many stages as ranks or half as many, each sharded over its own ranks.
struct Stage {
  explicit Stage(uint64_t seed)
      : data_parallel(world_size() == 4 ? 2 : 1),
        mesh(init_device_mesh(testing::test_device_type(), {world_size() / data_parallel, data_parallel}, {"pp", "dp"})),
        number(mesh.local_rank("pp")),
        model((at::manual_seed(seed + static_cast<uint64_t>(number)), 5), 3),
        optimizer((fully_shard(*model, mesh["dp"]), model->parameters()), torch::optim::AdamOptions(0.1)) {}
  void step() {
    at::manual_seed(7);
    model->forward(torch::randn({4, 5}).to(mesh.device())).square().sum().backward();
  }
  static std::string prefix(int64_t number) { return c10::str("stage", number, "."); }
  StateDict state() { return state_dict(*model, optimizer, {.prefix = prefix(number)}); }

  int64_t data_parallel;
  DeviceMesh mesh;
  int64_t number;
  torch::nn::Linear model;
  torch::optim::Adam optimizer;
};

void train(Stage& stage) {
  stage.step();
  stage.optimizer.step();
  stage.optimizer.zero_grad();
}

TEST(Stages, OfOneNameOnDifferentMeshesAreAnErrorOnEveryRank) {
  if (world_size() == 1) GTEST_SKIP() << "one rank is one stage";
  const SharedFolder folder;
  const Stage stage(1);
  const auto device = c10::DeviceTypeName(testing::test_device_type(), /*lower_case=*/true);
  std::string holders;
  for (int64_t r = 0; r < world_size(); r += static_cast<int>(stage.data_parallel)) {
    holders += stage.data_parallel == 2
                   ? c10::str("\n  DeviceMesh(", device, ", [", r, ", ", r + 1, "], names=(\"dp\")): ranks ", r, ", ", r + 1)
                   : c10::str("\n  DeviceMesh(", device, ", [", r, "], names=(\"dp\")): rank ", r);
  }
  const auto expected =
      "checkpoint: tensor \"weight\" lies on several meshes, so its holders have no parts of one tensor:" + holders +
      "\nReplicas with the same values belong on one mesh of all these ranks, with Replicate() along its other dim; different "
      "tensors need a name each, as the stages of a pipeline get from StateDictOptions::prefix";
  EXPECT_EQ(error_of([&] { save(state_dict(*stage.model), folder.path() / "c"); }), expected);
  EXPECT_EQ(error_of([&] { save_hugging_face(state_dict(*stage.model), folder.path() / "hf"); }), expected);
  // A tensor that is plain on one rank and sharded on another.
  const auto zeros = torch::zeros({3}, stage.mesh.device());
  const auto mixed = world_rank() == 0 ? zeros : Tensor(from_local(zeros, stage.mesh["dp"], {Replicate{}}));
  EXPECT_THAT(error_of([&] { save(state_of("t", mixed), folder.path() / "c"); }),
              HasSubstr("\n  plain, without a mesh: rank 0\n"));
}

TEST(Stages, WithPrefixesLoadWhereTheyWereSavedAndElsewhere) {
  const SharedFolder folder;
  Stage saved(1), loaded(100);
  train(saved);
  save(saved.state(), folder.path() / "c");
  load(loaded.state(), folder.path() / "c");
  train(saved);
  train(loaded);
  EXPECT_TENSORS_EQUAL(whole_tensor(loaded.model->weight), whole_tensor(saved.model->weight));
  EXPECT_TENSORS_EQUAL(whole_tensor(loaded.model->bias), whole_tensor(saved.model->bias));
  save(saved.state(), folder.path() / "d");

  // All stages on every rank, in one state; and each alone on one rank, unsharded.
  const auto stages = world_size() / saved.data_parallel;
  const auto options = [](int64_t s) { return StateDictOptions{.prefix = Stage::prefix(s)}; };
  std::vector<torch::nn::Linear> models;
  std::vector<std::unique_ptr<torch::optim::Adam>> optimizers;
  StateDict all, own;
  for (int64_t s = 0; s < stages; ++s) {
    models.emplace_back(5, 3);
    fully_shard(*models.back(), line_mesh(), {.initial_weights = InitialWeights::kUnchecked});
    optimizers.push_back(std::make_unique<torch::optim::Adam>(models.back()->parameters()));
    all.merge(state_dict(*models.back(), *optimizers.back(), options(s)));
  }
  load(all, folder.path() / "d");
  torch::nn::Linear alone(5, 3);
  if (world_rank() < stages) own = state_dict(*alone, options(world_rank()));
  load(own, folder.path() / "d", {.allow_unused = true});
  for (int64_t s = 0; s < stages; ++s) {
    const auto weight = whole_tensor(models[s]->weight);
    const auto moment = whole_tensor(all.tensor("optimizer.state." + Stage::prefix(s) + "weight.exp_avg"));
    EXPECT_EQ(static_cast<const torch::optim::AdamOptions&>(optimizers[s]->param_groups()[0].options()).lr(), 0.1);
    if (s == saved.number) {
      // Gathered over the stage's ranks alone, of which all take part here.
      const auto state = saved.state();
      EXPECT_TENSORS_EQUAL(weight, whole_tensor(saved.model->weight));
      EXPECT_TENSORS_EQUAL(moment, whole_tensor(state.tensor("optimizer.state." + Stage::prefix(s) + "weight.exp_avg")));
    }
    if (s == world_rank()) EXPECT_TENSORS_EQUAL(alone->weight, weight);
  }
}

TEST(Stages, OfOneModelAreTheModel) {
  const SharedFolder folder;
  Stage stage(1);
  train(stage);
  save(state_dict(*stage.model, stage.optimizer, {.prefix = c10::str("layers.", stage.number, ".")}), folder.path() / "c");
  struct Whole : torch::nn::Module {
    explicit Whole(int64_t count) : layers(register_module("layers", torch::nn::ModuleList())) {
      for (int64_t i = 0; i < count; ++i) layers->push_back(torch::nn::Linear(5, 3));
    }
    torch::nn::ModuleList layers;
  } whole(world_size() / stage.data_parallel);
  torch::optim::Adam optimizer(whole.parameters());
  load(state_dict(whole, optimizer), folder.path() / "c");
  EXPECT_TENSORS_EQUAL(whole.layers->ptr<torch::nn::LinearImpl>(stage.number)->weight, whole_tensor(stage.model->weight));
  EXPECT_EQ(static_cast<const torch::optim::AdamOptions&>(optimizer.param_groups()[0].options()).lr(), 0.1);

  // In memory: a stage takes its own, under the same names.
  Stage again(50);
  const StateDictOptions options{.full_state_dict = true, .prefix = Stage::prefix(stage.number)};
  if (stage.data_parallel == world_size()) load_state_dict(*again.model, state_dict(*stage.model, options), options);
}

TEST(TrainableParameters, ThatNothingShardedAreNamed) {
  struct Model : torch::nn::Module {
    Model() : block(register_module("block", torch::nn::Linear(4, 4))), head(register_module("head", torch::nn::Linear(4, 2))) {}
    torch::nn::Linear block, head;
  } model, other;
  EXPECT_EQ(state_dict(model).size(), 4); // nothing is sharded: a plain model
  const FullyShardOptions unchecked{.initial_weights = InitialWeights::kUnchecked};
  fully_shard(*model.block, line_mesh(), unchecked);
  fully_shard(*other.block, line_mesh(), unchecked);
  for (auto* each : {&model, &other}) each->head->to(testing::test_device());
  const std::string problem =
      "state dict: nothing sharded or replicated these parameters, beside others that are, so that each rank trains its own copy "
      "of "
      "them:\n  head.weight\n  head.bias\nCall fully_shard or replicate on the module that holds them (on the root, mostly), "
      "freeze "
      "them, name them in FullyShardOptions::ignored_params, or accept them with StateDictOptions::allow_unsharded_params";
  EXPECT_EQ(error_of([&] { state_dict(model); }), problem);
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  EXPECT_EQ(error_of([&] { state_dict(model, optimizer); }), problem);
  EXPECT_THAT(error_of([&] { load_state_dict(model, StateDict()); }), HasSubstr(testing::all_ranks() + ": " + problem));
  const StateDictOptions allowed{.allow_unsharded_params = true};
  EXPECT_EQ(state_dict(model, allowed).size(), 4);
  load_state_dict(other, state_dict(model, allowed), allowed);
  EXPECT_TENSORS_EQUAL(other.head->weight, model.head->weight);

  // Clipping both kinds together has no one norm.
  model.head->forward(model.block->forward(torch::ones({2, 4}, testing::test_device()))).sum().backward();
  EXPECT_THAT(error_of([&] { torch::nn::utils::clip_grad_norm_(model.parameters(), 1); }),
              AllOf(HasSubstr("the written argument 'self' is a plain tensor of shape [2, 4], but others are DTensors"),
                    HasSubstr("others are DTensors (what was computed from the gradient of weight)"),
                    HasSubstr("shard the root module too (state_dict and tessera::clip_grad_norm_ of a module name such "
                              "parameters), or clip them by themselves")));
  // By the module they have names, and nothing is scaled.
  for (auto& parameter : model.parameters()) parameter.mutable_grad() = torch::full_like(parameter, 3);
  const std::string apart =
      ": nothing sharded or replicated these parameters, beside others that are, so that each rank trains its own copy of them:"
      "\n  head.weight\n  head.bias\nCall fully_shard or replicate on the module that holds them (on the root, mostly), freeze "
      "them, name them in FullyShardOptions::ignored_params, or clip them by themselves, as a list";
  EXPECT_EQ(error_of([&] { clip_grad_norm_(model, 1); }), "clip_grad_norm_" + apart);
  EXPECT_EQ(error_of([&] { clip_grad_value_(model, 1); }), "clip_grad_value_" + apart);
  EXPECT_TENSORS_EQUAL(whole_tensor(model.block->bias.grad()), torch::full({4}, 3.0));
  EXPECT_NEAR(clip_grad_norm_(*model.block, 1).item<double>(), 3 * std::sqrt(20.0), 1e-5);
  clip_grad_value_(*model.block, 0.1);
  EXPECT_TENSORS_EQUAL(whole_tensor(model.block->bias.grad()), torch::full({4}, 0.1));
  for (auto& parameter : model.head->parameters()) parameter.requires_grad_(false);
  EXPECT_EQ(state_dict(model).size(), 4);
}

// Collects warnings in place of printing them.
struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

// Tensors that differ between ranks, one that does not, and one that rank 0 lacks.
StateDict differing_state(double offset) {
  StateDict state;
  state.add("mean", torch::full({3}, world_rank() + offset));
  state.add("half", torch::full({2}, world_rank() + offset, at::kHalf));
  state.add("complex", torch::full({2}, c10::complex<float>(0, static_cast<float>(world_rank() + offset)), at::kComplexFloat));
  state.add("count", torch::full({}, world_rank() + static_cast<int64_t>(offset), at::kLong));
  state.add("same", torch::ones({2}));
  if (world_rank() > 0) state.add("others", torch::full({2}, world_rank() + offset));
  return state;
}

// One number of each tensor.
std::vector<double> numbers(const StateDict& state) {
  std::vector<double> numbers;
  for (const auto& entry : state.entries()) {
    const auto& tensor = state.tensor(entry.name);
    numbers.push_back((tensor.is_complex() ? at::imag(tensor) : tensor).max().item<double>());
  }
  return numbers;
}

TEST(DifferingTensors, AreSavedAsTheOptionSays) {
  const SharedFolder folder;
  const double n = world_size(), middle = (n - 1) / 2, of_others = n / 2; // means of 0 … n - 1, and of 1 … n - 1
  const auto own = static_cast<double>(world_rank());
  struct Case {
    DifferingTensors choice;
    std::vector<double> expected; // of mean, half, complex, count, same, others
  };
  const std::vector<Case> cases{{DifferingTensors::kWarn, {0, 0, 0, 0, 1, 1}},
                                {DifferingTensors::kLowestRank, {0, 0, 0, 0, 1, 1}},
                                {DifferingTensors::kMean, {middle, middle, middle, 0, 1, of_others}},
                                {DifferingTensors::kEachRank, {own, own, own, own, 1, own}}};
  Checkpointer checkpointer;
  for (const auto& [choice, expected] : cases) {
    const auto name = std::to_string(static_cast<int>(choice));
    SCOPED_TRACE(name);
    Warnings warnings;
    {
      const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
      const auto state = differing_state(0);
      for (const bool overwrite : {false, true})
        save(state, folder.path() / name, {.overwrite = overwrite, .differing_tensors = choice});
      EXPECT_EQ(numbers(state), numbers(differing_state(0))); // the caller's stay
    }
    checkpointer.save(differing_state(0), folder.path() / (name + "-background"),
                      {.differing_tensors = choice == DifferingTensors::kWarn ? DifferingTensors::kLowestRank : choice});
    checkpointer.wait();
    for (const auto* kind : {"", "-background"}) {
      auto loaded = differing_state(100);
      load(loaded, folder.path() / (name + kind));
      auto numbers_expected = expected;
      if (world_rank() == 0) numbers_expected.pop_back();
      EXPECT_EQ(numbers(loaded), numbers_expected);
      EXPECT_TRUE(verify(folder.path() / (name + kind)).empty());
    }
    const bool warned = choice == DifferingTensors::kWarn && world_rank() == 0 && world_size() > 1;
    EXPECT_EQ(warnings.texts.size(), warned ? 1 : 0);
    const std::string names =
        world_size() > 2 ? "\n  mean\n  half\n  complex\n  count\n  others\n" : "\n  mean\n  half\n  complex\n  count\n";
    if (warned) {
      EXPECT_THAT(warnings.texts[0], AllOf(HasSubstr("checkpoint: plain tensors differ between ranks, and "),
                                           HasSubstr("/0 keeps the lowest rank's:" + names +
                                                     "set_differing_tensors, or the save's option differing_tensors, chooses")));
    }
  }
  if (world_size() == 1) return;
  EXPECT_THAT(error_of([&] { save(differing_state(0), folder.path() / "e", {.differing_tensors = DifferingTensors::kError}); }),
              HasSubstr("checkpoint: plain tensors differ between ranks:\n  mean\n  half\n  complex\n  count"));
  EXPECT_THAT(error_of([&] { save_hugging_face({}, folder.path() / "e", {.differing_tensors = DifferingTensors::kEachRank}); }),
              HasSubstr("differing_tensors cannot be kEachRank"));
}

/// Chosen for a while.
class Chosen {
 public:
  explicit Chosen(DifferingTensors choice) { set_differing_tensors(choice); }
  ~Chosen() { set_differing_tensors(before_); }
  Chosen(const Chosen&) = delete;
  Chosen& operator=(const Chosen&) = delete;

 private:
  DifferingTensors before_ = differing_tensors();
};

TEST(DifferingTensors, AreSavedAsTheProgramChoseOnce) {
  const SharedFolder folder;
  const auto mean_in = [&](const char* name) {
    auto loaded = state_of("mean", torch::zeros({3}));
    load(loaded, folder.path() / name, {.allow_unused = true});
    return loaded.tensor("mean")[0].item<double>();
  };
  EXPECT_EQ(differing_tensors(), DifferingTensors::kWarn);
  const auto differing = state_of("mean", torch::full({3}, static_cast<float>(world_rank())));
  const double middle = static_cast<double>(world_size() - 1) / 2;
  {
    const Chosen mean(DifferingTensors::kMean);
    save(differing, folder.path() / "plain");
    save_hugging_face(differing, folder.path() / "exported");
    Checkpointer checkpointer;
    checkpointer.save(differing, folder.path() / "background");
    const Chosen lowest(DifferingTensors::kLowestRank); // later: not for the save that runs
    checkpointer.wait();
    save(differing, folder.path() / "other", {.differing_tensors = DifferingTensors::kEachRank}); // of its own
  }
  for (const auto* name : {"plain", "exported", "background"}) EXPECT_EQ(mean_in(name), middle) << name;
  EXPECT_EQ(mean_in("other"), static_cast<double>(world_rank()));
  const Chosen each(DifferingTensors::kEachRank);
  EXPECT_THAT(error_of([&] { save_hugging_face(differing, folder.path() / "e"); }),
              HasSubstr("cannot be kEachRank, which set_differing_tensors chose"));
  if (world_size() == 1) return;
  for (const auto choice : {DifferingTensors::kEachRank, DifferingTensors::kLowestRank, DifferingTensors::kError}) {
    const auto own = world_rank() == 0 ? DifferingTensors::kMean : choice;
    EXPECT_THAT(error_of([&] { save(differing, folder.path() / "e", {.differing_tensors = own}); }),
                HasSubstr("differing_tensors is kMean on rank 0 and k"));
  }
  const Chosen none(DifferingTensors::kError);
  EXPECT_THAT(error_of([&] { save(differing, folder.path() / "e"); }), HasSubstr("plain tensors differ between ranks:\n  mean"));
}

TEST(DifferingTensors, OfEachRankGetNamesThatAreFree) {
  const SharedFolder folder;
  const auto state_with = [](double value) {
    StateDict state;
    state.add("x", torch::full({2}, value));
    state.add("x.rank1", torch::full({2}, 7.0));
    state.set("x.rank1.rank1", 8);
    return state;
  };
  save(state_with(static_cast<double>(world_rank())), folder.path() / "c", {.differing_tensors = DifferingTensors::kEachRank});
  auto loaded = state_with(-1);
  loaded.set("x.rank1.rank1", 0);
  load(loaded, folder.path() / "c");
  EXPECT_EQ(loaded.tensor("x")[0].item<double>(), static_cast<double>(world_rank()));
  EXPECT_EQ(loaded.tensor("x.rank1")[0].item<double>(), 7);
  EXPECT_EQ(loaded.value<int64_t>("x.rank1.rank1"), 8);
}

TEST(DifferingTensors, OfEachRankLoadWhereThereAreOtherRanksOrLayouts) {
  const SharedFolder folder;
  save(differing_state(0), folder.path() / "c", {.differing_tensors = DifferingTensors::kEachRank});
  // A sharded tensor is one: it takes the lowest rank's. No rank needs to ask for the others.
  auto sharded = state_of("mean", distribute_tensor(torch::full({3}, 7.0, at::kFloat), line_mesh(), {Shard{0}}));
  load(sharded, folder.path() / "c", {.allow_unused = true});
  EXPECT_TENSORS_EQUAL(whole_tensor(sharded.tensor("mean")), torch::zeros({3}));
  SharedFolder::barrier();
  if (world_rank() == 0) {
    auto index = internal::read_index(folder.path() / "c");
    for (auto& tensor : index.tensors) tensor.copy.rank += 100; // ranks that this job has not
    testing::write_text(folder.path() / "c" / internal::kIndexName, internal::encode_index(index));
  }
  SharedFolder::barrier();
  auto loaded = differing_state(100);
  const auto report = load(loaded, folder.path() / "c");
  EXPECT_EQ(numbers(loaded), world_rank() == 0 ? (std::vector<double>{0, 0, 0, 0, 1}) : (std::vector<double>{0, 0, 0, 0, 1, 1}));
  EXPECT_TRUE(report.unused.empty());
}

TEST(AfterTheProcessGroup, ASaveOrLoadOfDTensorsSaysThatItIsGone) {
  const SharedFolder folder;
  const auto& path = folder.path();
  torch::nn::Linear sharded(8, 8), replicated(4, 4);
  const FullyShardOptions unchecked{.initial_weights = InitialWeights::kUnchecked};
  fully_shard(*sharded, line_mesh(), unchecked);
  replicate(*replicated, line_mesh(), unchecked);
  auto states = std::vector{state_dict(*sharded), state_dict(*replicated)};
  for (size_t i = 0; i < states.size(); ++i) save(states[i], path / std::to_string(i));
  const int number = world_rank();
  destroy_process_group();
  for (size_t i = 0; i < states.size(); ++i) {
    const std::string gone = "checkpoint: tensor \"weight\": it is a DTensor, and the process group is gone";
    EXPECT_THAT(error_of([&] { save(states[i], path / "again"); }), HasSubstr(gone));
    EXPECT_THAT(error_of([&] { save_hugging_face(states[i], path / "again"); }), HasSubstr(gone));
    EXPECT_THAT(error_of([&] { load(states[i], path / std::to_string(i)); }), HasSubstr(gone));
    EXPECT_THAT(error_of([&] { load_state_dict(states[i], states[i]); }), HasSubstr(gone));
    EXPECT_FALSE(std::filesystem::exists(path / "again"));
  }
  EXPECT_THAT(error_of([&] { state_dict(*sharded, {.full_state_dict = true}); }), HasSubstr("the process group is gone"));
  EXPECT_EQ(error_of([&] { save(state_of("plain", torch::ones({2})), path / c10::str("plain of ", number)); }), "no error");
  init_process_group();
}

} // namespace
} // namespace tessera::checkpoint::snapshot_test
