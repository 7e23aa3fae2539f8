// Trains a byte-level GPT as a config file says: DeepSpeed's JSON, with what DeepSpeed has no keys for in a block "tessera".
//
//   train_from_config --config examples/from_config/gpt.json --ranks 4
//   torchrun --no-python --nproc-per-node 4 train_from_config --config examples/from_config/gpt.json
#include <tessera/tessera.h>

#include <iostream>

#include "common/files.h"
#include "gpt/model.h"
#include "gpt/sampling.h"

namespace {

struct ModelOptions : gpt::ModelConfig {
  void read(tessera::OwnSettings& settings) {
    settings.read("layers", layers).read("width", width).read("heads", heads).read("sequence", sequence);
  }
};

/// A part of a text as rows of bytes, each with the bytes that follow.
class Rows {
 public:
  Rows(torch::Tensor bytes, int64_t sequence) : bytes_(std::move(bytes)), sequence_(sequence) {}

  int64_t size() const { return (bytes_.numel() - 1) / sequence_; }
  tessera::TokenBatch get(const std::vector<size_t>& rows) const {
    std::vector<torch::Tensor> inputs, targets;
    for (const auto row : rows) {
      const auto begin = static_cast<int64_t>(row) * sequence_;
      inputs.push_back(bytes_.narrow(0, begin, sequence_));
      targets.push_back(bytes_.narrow(0, begin + 1, sequence_));
    }
    return {.inputs = torch::stack(inputs).to(torch::kLong), .targets = torch::stack(targets).to(torch::kLong)};
  }

 private:
  torch::Tensor bytes_;
  int64_t sequence_;
};

torch::Tensor read_text(const tessera::TrainSetup& setup) {
  const auto path = setup.arguments().empty() ? ".data/text.txt" : setup.arguments().front();
  auto text = examples::read_file(path, "the data file", "scripts/setup makes .data/text.txt");
  return torch::from_blob(text.data(), {static_cast<int64_t>(text.size())}, torch::kUInt8).clone();
}

tessera::TrainingEnd train(tessera::TrainSetup& setup) {
  const auto options = setup.own<ModelOptions>("model");
  torch::manual_seed(setup.config().trainer.seed); // every rank draws the same weights
  gpt::Gpt model(options);
  setup.shard(*model, tessera::TrainSetup::blocks_of<gpt::BlockImpl>(*model));
  auto& optimizer = setup.make_optimizer(*model);

  const auto text = read_text(setup);
  const auto held_out = text.numel() / 20;
  const Rows rows(text.slice(0, 0, -held_out), options.sequence),
      valid(text.slice(0, -held_out).slice(0, 0, 20000), options.sequence);
  auto trainer = setup.trainer<tessera::TokenBatch>(*model, optimizer);
  trainer
      .loss([&](const tessera::TokenBatch& batch) {
        const auto here = batch.to(setup.device());
        return tessera::LossMean{gpt::cross_entropy(model->forward(here.inputs), here.targets)};
      })
      .data(tessera::prefetch(tessera::RowSource(rows, setup.data_mesh(), setup.rows())))
      .evaluate("valid", tessera::RowSource(valid, setup.data_mesh(), setup.rows_to_evaluate()));
  auto end = trainer.run();
  if (end.reason == tessera::StopReason::kTerminated) return end;
  const auto sample = gpt::sample(model, "It is a truth ", setup.device(), {.bytes = 256});
  if (tessera::process_context().rank() == 0) std::cout << "--- sample\n" << gpt::printable(sample) << "\n---" << std::endl;
  return end;
}

} // namespace

int main(int argc, char** argv) { return tessera::train_main(argc, argv, train); }
