// The model of the study (benchmarks/study): a GPT over the bytes of a text, which goes on from the weights of a checkpoint.
// Its words before the flags of tessera-bench:
//
//   study_model TEXT WEIGHTS --layers 10 --width 640 …
//   study_model TEXT WEIGHTS --prepare STEPS LAYERS WIDTH SEQUENCE     trains such weights, on the part of the text that is held
//   out
#include <c10/util/Exception.h>
#include <common/program.h>
#include <gpt/model.h>
#include <gpt/text.h>
#include <tessera/benchmarks/bench.h>
#include <tessera/checkpoint.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

namespace {

using torch::Tensor;

constexpr uint64_t kSeed = 1;
constexpr int64_t kHeads = 8;

gpt::Gpt make_gpt(int64_t layers, int64_t width, int64_t sequence) {
  return gpt::Gpt(gpt::ModelConfig{.layers = layers, .width = width, .heads = kHeads, .sequence = sequence});
}

tessera::BenchModel make_model(const tessera::BenchSettings& settings) {
  auto model = make_gpt(settings.layers, settings.width, settings.sequence);
  model->set_recompute(settings.recompute);
  auto loss = [model](const std::vector<Tensor>& batch) mutable {
    return gpt::cross_entropy(model->forward(batch[0]), batch[1]);
  };
  return {model.ptr(), {model->blocks()->begin(), model->blocks()->end()}, loss};
}

tessera::BenchRecipe recipe_of(const std::string& text, const std::string& weights) {
  auto batch = [text](const tessera::BenchSettings& settings, const tessera::BenchPlace& place) -> std::vector<Tensor> {
    const gpt::Text bytes(text, settings.sequence, kSeed);
    const auto rows = bytes.training_batch(place.step, place.rank * settings.batch, settings.batch);
    return {rows.inputs, rows.targets};
  };
  auto load = [weights](torch::nn::Module& module) { tessera::checkpoint::load(tessera::state_dict(module), weights); };
  return {.model = make_model,
          .batch = batch,
          .items = [](const tessera::BenchSettings& settings) { return settings.batch * settings.sequence; },
          .weights = load};
}

/// Trains a model in one process on the part of the text that no case sees, and saves its weights.
int prepare(const std::vector<std::string>& words) {
  TORCH_CHECK(words.size() == 7, "usage: study_model TEXT WEIGHTS --prepare STEPS LAYERS WIDTH SEQUENCE");
  const auto number = [&](size_t at) { return std::stoll(words[at]); };
  constexpr int64_t kRows = 4;
  torch::manual_seed(kSeed);
  auto model = make_gpt(number(4), number(5), number(6));
  const gpt::Text bytes(words[0], number(6), kSeed);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  double loss = 0;
  for (int64_t step = 0; step < number(3); ++step) {
    const auto batch = bytes.validation_batch(step, 0, kRows);
    optimizer.zero_grad();
    auto mean = gpt::cross_entropy(model->forward(batch.inputs), batch.targets);
    mean.backward();
    optimizer.step();
    loss = mean.item<double>();
  }
  tessera::checkpoint::save(tessera::state_dict(*model), words[1], {.overwrite = true});
  std::printf("%zu bytes of text, loss %.4f\n", static_cast<size_t>(bytes.size()), loss);
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("study_model", [&] {
    const std::vector<std::string> words(argv + 1, argv + argc);
    TORCH_CHECK(words.size() > 2,
                "usage: study_model TEXT WEIGHTS --prepare STEPS LAYERS WIDTH SEQUENCE, or flags of tessera-bench");
    if (words[2] == "--prepare") return prepare(words);
    tessera::BenchModels models;
    models.add("gpt", recipe_of(words[0], words[1]));
    tessera::BenchMainOptions options{.own_arguments = 2};
    options.defaults.verify = false;
    options.defaults.limit = "process";
    return tessera::bench_main(argc, argv, models, options);
  });
}
