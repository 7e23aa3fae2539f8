// A trainer's step where ranks share sequences: each has the loss and the count of its part.
#include <tessera/tessera.h>

#include <optional>
#include <vector>

#include <tessera/tests/parallel/gpt_training.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::trainer_context_test {
namespace {

using tessera::Strategy; // beside that of the tests

constexpr int64_t kSteps = 6, kMicro = 2;

struct Part {
  torch::Tensor tokens, positions;
  torch::Tensor labels; ///< of this rank alone: those of a DTensor would count for all parts
};

struct Case {
  int64_t parts;
  ContextParallel scheme;
  Strategy strategy;
  bool is_sgd;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int64_t parts = 1; parts <= world_size(); ++parts) {
    for (const auto scheme : {ContextParallel::kAllGather, ContextParallel::kRing}) {
      for (const auto strategy : {Strategy::kFullShard, Strategy::kZero2, Strategy::kNoShard}) {
        for (const bool is_sgd : {true, false})
          if (world_size() % parts == 0) all.push_back({parts, scheme, strategy, is_sgd});
      }
    }
  }
  return all;
}

/// This rank's micro-batches, one step after another.
struct PartSource {
  DeviceMesh mesh; ///< (dp, cp)
  DataPosition at = {};

  std::optional<Part> next() {
    const Rows rows(at.row / kMicro);
    const auto mine = [&](const torch::Tensor& tensor) {
      return tensor.chunk(mesh.size(0))[static_cast<size_t>(mesh.local_rank("dp"))].chunk(
          kMicro)[static_cast<size_t>(at.row % kMicro)];
    };
    const auto parts = split_sequence({mine(rows.tokens), mine(rows.labels)}, {1, 1}, mesh["cp"], {.pad_values = {0, kIgnored}});
    ++at.row;
    return Part{parts.tensors[0], parts.positions, to_local(parts.tensors[1])};
  }
  DataPosition position() const { return at; }
  void seek(const DataPosition& position) { at = position; }
};

SmallGpt make_gpt() {
  torch::manual_seed(3);
  return SmallGpt();
}

TrainedGpt train_split(const Case& given) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size() / given.parts, given.parts}, {"dp", "cp"});
  const auto all = mesh.flatten("dp_cp");
  auto gpt = make_gpt();
  for (auto& block : *gpt->blocks) fully_shard(*block, all, {.strategy = given.strategy});
  fully_shard(*gpt, all, {.strategy = given.strategy});
  const auto optimizer = (given.is_sgd ? sgd : adamw)(gpt->parameters());
  Trainer<Part> trainer(*gpt, *optimizer, {.mesh = all, .data_mesh = all, .micro_batches = kMicro, .max_grad_norm = 0.3});
  trainer.data(PartSource{mesh}).count([](const Part& part) {
    return static_cast<double>(part.labels.ne(kIgnored).sum().item<int64_t>());
  });
  trainer.rows([](const Part& part) { return static_cast<double>(part.tokens.size(0)); });
  trainer.loss([&](const Part& part) {
    const ContextParallelScope scope(given.scheme);
    return LossSum{sum_of_losses(to_local(gpt->forward(part.tokens, part.positions)), part.labels)};
  });
  TrainedGpt trained;
  for (int64_t step = 0; step < kSteps; ++step) trained.losses.push_back(trainer.step().loss);
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : gpt->parameters())
    trained.weights.push_back((is_dtensor(parameter) ? DTensor(parameter).full_tensor() : parameter.detach()).cpu());
  return trained;
}

TEST(TrainerContext, IsOneProcessWhoeverHasWhichPartOfASequence) {
  std::vector<TrainedGpt> expected;
  for (const auto& optimizer : {MakeOptimizer(sgd), MakeOptimizer(adamw)}) {
    auto gpt = make_gpt();
    expected.push_back(train(
        gpt, {.optimizer = optimizer, .steps = kSteps}, [&](const Rows& rows) { return loss_of_whole(gpt, rows); }, item));
  }
  for (const auto& given : sweep(cases(), 4)) {
    SCOPED_TRACE(c10::str(given.parts, " parts, ", to_string(given.scheme), ", ", given.is_sgd ? "SGD" : "AdamW"));
    expect_close(train_split(given), expected[given.is_sgd ? 0 : 1], 1e-5);
  }
}

} // namespace
} // namespace tessera::testing::trainer_context_test
