// What reductions in fewer bits keep from step to step, in checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/communication_state.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/fsdp/communication.h>
#include <tessera/parallel/pipeline.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/parallel/pipeline_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::communication_state_test {
namespace {

Communication feeding_back(Wire wire = Wire::kInt4) {
  return {.reduction = quantized_reduction({.codec = {wire, 64}, .smallest = 200, .error_feedback = true})};
}

struct Training {
  Training(Strategy strategy, const Communication& communication) : net(make_net()) {
    strategy.options.communication = communication;
    shard_model(net, strategy);
    optimizer = std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(1e-2));
  }
  void run(int64_t first, int64_t last) {
    for (int64_t step = first; step < last; ++step) {
      optimizer->zero_grad();
      loss_of(net, own_batch(step)).backward();
      optimizer->step();
    }
  }
  StateDict state() {
    auto all = state_dict(*net, *optimizer);
    all.merge(communication_state(*net));
    return all;
  }

  Net net;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

void expect_equal(const Net& a, const Net& b, bool are_equal = true) {
  bool all = true;
  for (size_t i = 0; i < a->parameters().size(); ++i)
    all = all && torch::equal(full(a->parameters()[i]), full(b->parameters()[i]));
  EXPECT_EQ(all, are_equal);
}

TEST(CommunicationState, AResumedTrainingGoesOnAsIfItHadNotBeenStopped) {
  for (const auto& strategy : sweep(strategies(), 4, is_default)) {
    SCOPED_TRACE(strategy.name);
    const SharedFolder folder;
    Training whole(strategy, feeding_back()), first(strategy, feeding_back());
    whole.run(0, 5);
    first.run(0, 3);
    checkpoint::save(first.state(), folder.path() / "step");
    Training resumed(strategy, feeding_back()), without(strategy, feeding_back());
    auto state = resumed.state();
    checkpoint::load(state, folder.path() / "step");
    resumed.run(3, 5);
    expect_equal(resumed.net, whole.net);
    auto weights = state_dict(*without.net, *without.optimizer);
    checkpoint::load(weights, folder.path() / "step", {.allow_unused = true});
    without.run(3, 5);
    expect_equal(without.net, whole.net, world_size() == 1);
    EXPECT_EQ(communication_state(*whole.net).size() > 0, world_size() > 1);
  }
}

TEST(CommunicationState, RefusesThatOfAnotherPolicy) {
  if (world_size() == 1) return;
  const SharedFolder folder;
  const Strategy strategy{"full", world_mesh, {}};
  Training saved(strategy, feeding_back()), other(strategy, feeding_back(Wire::kInt8)), none(strategy, {});
  saved.run(0, 1);
  none.run(0, 1);
  checkpoint::save(saved.state(), folder.path() / "int4");
  checkpoint::save(none.state(), folder.path() / "plain");
  auto state = other.state();
  EXPECT_THROWS_WITH(
      checkpoint::load(state, folder.path() / "int4"),
      "what reductions of another policy keep: int4 in blocks of 64, from 200 elements on, with error feedback, and "
      "here it is int8");
  auto plain = none.state();
  checkpoint::load(plain, folder.path() / "int4", {.allow_unused = true}); // nothing asks for it
  Training fresh(strategy, feeding_back());
  auto empty = fresh.state();
  checkpoint::load(empty, folder.path() / "plain"); // begins with zeros
  fresh.run(1, 2);
}

TEST(CommunicationState, RefusesThatOfOtherRanks) {
  if (world_size() > 1) GTEST_SKIP() << "has its own ranks";
  const TemporaryFolder folder;
  const auto train = [&](int ranks) {
    std::vector<Net> nets;
    for (int rank = 0; rank < ranks; ++rank) nets.push_back(make_net());
    run_ranks_as_threads(ranks, [&] {
      Net net = nets[static_cast<size_t>(world_rank())];
      FullyShardOptions options;
      options.communication = feeding_back();
      for (auto& block : *net->blocks) fully_shard(*block, world_mesh(), options);
      fully_shard(*net, world_mesh(), options);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      auto state = state_dict(*net, optimizer);
      state.merge(communication_state(*net));
      loss_of(net, own_batch(0)).backward();
      if (ranks == 4) return checkpoint::save(state, folder.path() / "step");
      EXPECT_THROWS_WITH(checkpoint::load(state, folder.path() / "step"), "keep of 4 ranks, but there are 2");
      auto weights = state_dict(*net, optimizer);
      checkpoint::load(weights, folder.path() / "step", {.allow_unused = true});
    });
  };
  train(4);
  train(2);
}

/// Stages over `pp`, each sharded over `dp`.
struct PipelineTraining {
  explicit PipelineTraining(const DeviceMesh& mesh)
      : data(mesh["dp"]), pipeline(make_stages(model, mesh), PipelineScheduleKind::k1F1B, text_loss(), {.data_mesh = data}) {
    optimizer = pipeline_adamw(pipeline.stages().parameters());
  }
  static PipelineStages make_stages(PipelineGpt& model, const DeviceMesh& mesh) {
    auto stages = split(layers_of(model), mesh["pp"]);
    fully_shard(stages, mesh["dp"], {.communication = feeding_back()});
    return stages;
  }
  void run(int64_t first, int64_t last) {
    for (int64_t step = first; step < last; ++step) {
      optimizer->zero_grad();
      pipeline.step(text_batches({}, step, data.local_rank()));
      optimizer->step();
    }
  }
  StateDict state(bool with_copies) {
    const auto& stages = pipeline.stages();
    auto all = state_dict(*stages.module, *optimizer, {.flatten_optimizer_state_dict = true});
    if (!with_copies) all.erase_if([&](const StateDict::Entry& entry) { return stages.is_copy(entry.name); });
    all.merge(communication_state(*stages.module));
    return all;
  }
  std::vector<torch::Tensor> weights() const {
    std::vector<torch::Tensor> all;
    for (const auto& parameter : pipeline.stages().parameters()) all.push_back(full(parameter));
    return all;
  }

  PipelineGpt model = seeded_pipeline_gpt({.depth = 4});
  DeviceMesh data;
  Pipeline pipeline;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

TEST(CommunicationState, OfAPipelineGoesOnToo) {
  if (world_size() != 4) GTEST_SKIP() << "is for two stages on two ranks each";
  const SharedFolder folder;
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"pp", "dp"});
  PipelineTraining whole(mesh), first(mesh), resumed(mesh);
  whole.run(0, 4);
  first.run(0, 2);
  EXPECT_GT(communication_state(*first.pipeline.stages().module).size(), 2);
  checkpoint::save(first.state(false), folder.path() / "step");
  auto state = resumed.state(true);
  checkpoint::load(state, folder.path() / "step");
  resumed.run(2, 4);
  const auto got = resumed.weights(), expected = whole.weights();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TENSORS_EQUAL(got[i], expected[i]);
  auto kept = communication_state(*resumed.pipeline.stages().module);
  auto others = communication_state(*whole.pipeline.stages().module);
  for (const auto& entry : kept.entries()) {
    if (entry.is_tensor()) EXPECT_TENSORS_EQUAL(full(kept.tensor(entry.name)), full(others.tensor(entry.name))) << entry.name;
  }
}

TEST(CommunicationState, KeepsPowerSGD) {
  if (world_size() == 1) return;
  const SharedFolder folder;
  const Strategy strategy{"no-shard", world_mesh, {}, /*replicates=*/true};
  const Communication low_rank{.reduction = power_sgd({.rank = 2, .start_after = 2})};
  Training whole(strategy, low_rank), first(strategy, low_rank), resumed(strategy, low_rank);
  whole.run(0, 7);
  first.run(0, 4);
  checkpoint::save(first.state(), folder.path() / "step");
  auto state = resumed.state();
  checkpoint::load(state, folder.path() / "step");
  resumed.run(4, 7);
  expect_equal(resumed.net, whole.net);
}

} // namespace
} // namespace tessera::testing::communication_state_test
