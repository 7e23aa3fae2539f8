#include "embed_minilm/fine_tuning.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <tessera/dtensor/api.h>
#include <tessera/training/progress_bar.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "common/files.h"
#include "common/json_lines.h"
#include "common/memory.h"
#include "common/ranks.h"
#include "embed_minilm/sentences.h"

namespace minilm {
namespace {

constexpr double kScale = 20;

torch::Tensor whole(const torch::Tensor& tensor) {
  return tessera::is_dtensor(tensor) ? tessera::DTensor(tensor).full_tensor() : tensor;
}

// Which pairs each step takes: every epoch goes through whole batches in an order of its own.
class Batches {
 public:
  Batches(size_t pairs, int64_t batch, uint64_t seed) : pairs_(static_cast<int64_t>(pairs)), batch_(batch), seed_(seed) {}

  std::vector<int64_t> of_step(int64_t step) const {
    const auto a_epoch = pairs_ / batch_, epoch = step / a_epoch;
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed_ + static_cast<uint64_t>(epoch));
    const auto order = torch::randperm(pairs_, generator, torch::kLong).narrow(0, step % a_epoch * batch_, batch_);
    return {order.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>() + batch_};
  }

 private:
  int64_t pairs_, batch_;
  uint64_t seed_;
};

// This rank's share of the batch: its first sentences and, in the same forward, its second ones.
torch::Tensor batch_loss(SentenceEncoder& encoder, const Pairs& pairs, const std::vector<int64_t>& batch) {
  const auto rows = static_cast<int64_t>(batch.size());
  const auto [lo, hi] = encoder.share(rows);
  std::vector<std::vector<int64_t>> sentences;
  for (const auto* side : {&pairs.first, &pairs.second}) {
    for (auto row = lo; row < hi; ++row) sentences.push_back((*side)[static_cast<size_t>(batch[static_cast<size_t>(row)])]);
  }
  const auto sides = encoder.forward(sentences).chunk(2);
  return whole(contrastive_loss(encoder.over_ranks(sides[0], rows), encoder.over_ranks(sides[1], rows)));
}

// Of how many pairs the second sentence is, among all second ones, the most like the first.
int64_t pairs_found(SentenceEncoder& encoder, const Pairs& pairs, int64_t batch) {
  const auto first = whole(encoder.embed(pairs.first, batch)), second = whole(encoder.embed(pairs.second, batch));
  const auto found = torch::matmul(first, second.t()).argmax(1);
  return (found == torch::arange(found.size(0), found.options())).sum().item<int64_t>();
}

} // namespace

torch::Tensor contrastive_loss(const torch::Tensor& first, const torch::Tensor& second) {
  const auto scores = torch::matmul(first, second.t()) * kScale;
  return (torch::logsumexp(scores, 1) - (first * second).sum(1) * kScale).mean();
}

void fine_tune(SentenceEncoder& encoder, const Options& options) {
  const auto pairs = read_pairs(options.pairs, [&](std::string_view text) { return encoder.tokenize(text); });
  TORCH_CHECK(static_cast<int64_t>(pairs.size()) >= options.global_batch, "the file of pairs ", options.pairs, " has ",
              pairs.size(), " pairs, fewer than --global-batch ", options.global_batch);
  TORCH_CHECK(options.save.empty() || !std::filesystem::exists(options.save), "--save ", options.save, " exists already");
  const bool first = examples::rank() == 0;
  if (first && !options.save.empty()) examples::make_folder_of(options.save); // an error now, not after the training
  examples::JsonLines log(first ? options.log : "", /*append=*/false);
  tessera::ProgressBar progress(options.steps, !first);
  torch::optim::AdamW optimizer(encoder.model()->parameters(), torch::optim::AdamWOptions(options.learning_rate));
  const Batches batches(pairs.size(), options.global_batch, options.seed);

  const auto before = pairs_found(encoder, pairs, options.batch);
  progress.begin(0);
  for (int64_t step = 0; step < options.steps; ++step) {
    optimizer.zero_grad();
    const auto loss = batch_loss(encoder, pairs, batches.of_step(step));
    // Sharding takes the mean of the ranks' gradients; this loss is the whole batch's on every rank already.
    (loss * examples::world_size()).backward();
    optimizer.step();
    const auto value = loss.item<double>();
    TORCH_CHECK(std::isfinite(value), "the loss of step ", step + 1, " is ", value, "; a smaller --lr may help");
    log.write({{"kind", "step"}, {"step", step + 1}, {"loss", value}});
    progress.step(step + 1, fmt::format("loss {:.4f}", value));
  }
  const auto bytes = examples::max_over_ranks({static_cast<double>(examples::state_bytes(*encoder.model(), &optimizer))})[0];
  progress.line(fmt::format("parameters, gradients and optimizer state: {:.1f} MB a rank", bytes / 1e6));
  progress.line(fmt::format("the second sentence found from the first: {} of {} pairs before, {} after", before, pairs.size(),
                            pairs_found(encoder, pairs, options.batch)));
  if (!options.log.empty()) progress.line("log: " + options.log);
  if (options.save.empty()) return;
  encoder.save(options.save);
  progress.line("model: " + options.save);
}

} // namespace minilm
