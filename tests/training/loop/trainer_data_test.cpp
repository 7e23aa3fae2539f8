// A trainer reads token files, and goes on in the middle of them.
#include <tessera/tessera.h>

#include <optional>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/training/loop/token_training.h>

namespace tessera::testing::trainer_data_test {
namespace {

constexpr int64_t kRows = 41, kSequence = 8;

void write_tokens(const std::string& path) {
  TokenFileWriter writer(path, /*vocabulary=*/61);
  auto generator = at::detail::createCPUGenerator(3);
  for (int64_t document = 0; document < 4; ++document) {
    const auto tokens = torch::randint(0, 61, {kRows * kSequence / 4 + 1}, generator, torch::kLong);
    writer.add({tokens.const_data_ptr<int64_t>(), static_cast<size_t>(tokens.numel())});
  }
  writer.finish();
}

/// The losses of `steps` steps from where the folder is.
std::vector<double> train(const std::string& tokens, const std::string& folder, int64_t steps, LastRows last_rows) {
  auto net = double_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Trainer<TokenBatch> trainer(
      *net, optimizer,
      {.micro_batches = 2, .stop_after = {.steps = steps}, .save = {.folder = folder}, .log = {.progress = false}});
  trainer.loss([&](const TokenBatch& batch) {
    const auto scores = net->forward(batch.inputs).reshape({-1, 61});
    return LossSum{at::cross_entropy_loss(scores, batch.targets.reshape({-1}).to(scores.device()), {}, at::Reduction::Sum)};
  });
  trainer.data(prefetch(token_source(tokens, {.sequence = kSequence}, world_mesh(),
                                     {.batch = 12 / world_size(), .seed = 7, .last_rows = last_rows})));
  std::vector<double> losses;
  trainer.on_step([&](const StepEvent& event, Control&) { losses.push_back(event.loss); });
  trainer.run();
  return losses;
}

TEST(TrainerData, ReadsTokenFilesAndResumesInTheMiddle) {
  SharedFolder root;
  const auto tokens = (root.path() / "tokens.bin").string();
  if (world_rank() == 0) write_tokens(tokens);
  SharedFolder::barrier();
  for (const auto last_rows : {LastRows::kUneven, LastRows::kDrop, LastRows::kRepeat}) {
    const auto mode = std::to_string(static_cast<int>(last_rows));
    SCOPED_TRACE(mode);
    const auto whole = train(tokens, (root.path() / ("whole" + mode)).string(), 5, last_rows); // two epochs and a half
    ASSERT_EQ(whole.size(), 5U);
    for (int64_t cut = 1; cut < 5; ++cut) {
      const auto folder = (root.path() / (mode + "-" + std::to_string(cut))).string();
      auto losses = train(tokens, folder, cut, last_rows);
      const auto rest = train(tokens, folder, 5, last_rows);
      losses.insert(losses.end(), rest.begin(), rest.end());
      EXPECT_EQ(losses, whole) << "cut after " << cut;
    }
  }
}

} // namespace
} // namespace tessera::testing::trainer_data_test
