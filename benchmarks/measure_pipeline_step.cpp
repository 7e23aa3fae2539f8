// One rank of a training step in a pipeline, driven by `benchmarks/compare` through standard input. Takes the flags of train_gpt.
// The step is that of train_gpt, with the fused AdamW. The head is not tied to the embedding, and the blocks are cut in stages of
// as many, as in peer/measure_pipeline_step.py.
#include <common/program.h>
#include <common/ranks.h>
#include <gpt/model.h>
#include <gpt/options.h>
#include <tessera/collectives/process_context.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/optim/fused.h>
#include <tessera/parallel/pipeline.h>
#include <torch/torch.h>

#include <chrono>

#include "serve.h"

namespace tessera::benchmarks {
namespace {

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const gpt::ModelConfig& config)
      : tokens(register_module("tokens", torch::nn::Embedding(gpt::kVocabulary, config.width))),
        places(register_module("places", torch::nn::Embedding(config.sequence, config.width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})))),
        head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(config.width, gpt::kVocabulary).bias(false)))) {
    for (int64_t i = 0; i < config.layers; ++i) blocks->push_back(gpt::Block(config));
  }

  torch::nn::Embedding tokens, places;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Model);

using Pair = std::tuple<torch::Tensor, torch::Tensor>; // inputs and targets

PipelineLayers layers_of(Model& model) {
  auto* const net = model.get();
  PipelineLayers layers(*model);
  layers.add("embed", {"tokens", "places"}, [net](const Pair& batch) {
    const auto& text = std::get<0>(batch);
    return net->tokens(text) + net->places(torch::arange(text.size(1)));
  });
  layers.add_list("blocks", [](gpt::BlockImpl& block, const torch::Tensor& x) { return block.forward(x); });
  layers.add("head", {"norm", "head"}, [net](const torch::Tensor& x) { return net->head(net->norm(x)); });
  return layers;
}

PipelineLoss cross_entropy() {
  return {.sum = [](const PipelineValue& logits, const PipelineValue& batch) {
    return gpt::cross_entropy(logits.toTensor(), std::get<1>(batch.to<Pair>()));
  }};
}

/// Stages of as many blocks, with the embedding before the first one and the head after the last.
std::vector<int64_t> bounds_of(int64_t blocks, int64_t stages) {
  std::vector<int64_t> bounds;
  for (int64_t stage = 1; stage < stages; ++stage) bounds.push_back(1 + stage * blocks / stages);
  return bounds;
}

/// The products of a rank's blocks in a step, forward and both halves of backward, without all else.
class Products {
 public:
  Products(const gpt::ModelConfig& model, int64_t blocks, int64_t rows, int64_t times) : times_(times) {
    const auto width = model.width;
    for (int64_t i = 0; i < blocks; ++i) {
      for (const auto& [out, in] : {std::pair(3 * width, width), {width, width}, {4 * width, width}, {width, 4 * width}})
        layers_.push_back({torch::randn({out, in}), torch::randn({rows, in}), torch::randn({rows, out})});
    }
  }
  void run() const {
    for (int64_t i = 0; i < times_; ++i) {
      for (const auto& [weight, input, gradient] : layers_) {
        torch::mm(input, weight.t());
        torch::mm(gradient, weight);
        torch::mm(gradient.t(), input);
      }
    }
  }

 private:
  struct Layer {
    torch::Tensor weight, input, gradient;
  };
  int64_t times_;
  std::vector<Layer> layers_;
};

class PipelineStep {
 public:
  explicit PipelineStep(const gpt::Options& options)
      : model_(options.model),
        pipeline_(make(options)),
        optimizer_(pipeline_.stages().parameters(), options.learning_rate),
        products_(options.model, options.model.layers / process_context().world_size(), options.batch * options.model.sequence,
                  options.micro_batches) {
    torch::manual_seed(options.seed);
    for (int64_t i = 0; i < options.micro_batches; ++i) {
      const auto windows = torch::randint(gpt::kVocabulary, {options.batch, options.model.sequence + 1}, torch::kLong);
      batches_.emplace_back(Pair(windows.narrow(1, 0, options.model.sequence).contiguous(),
                                 windows.narrow(1, 1, options.model.sequence).contiguous()));
    }
  }

  nlohmann::json run() {
    const auto begin = Clock::now();
    optimizer_.zero_grad();
    pipeline_.step(batches_);
    const auto middle = Clock::now();
    optimizer_.step();
    const auto end = Clock::now();
    return {{"schedule", seconds(middle - begin)}, {"optimizer", seconds(end - middle)}, {"step", seconds(end - begin)}};
  }

  /// The least that a step under this schedule can take: the products alone, and the schedule's waiting.
  nlohmann::json run_products() {
    const auto begin = Clock::now();
    products_.run();
    const auto took = seconds(Clock::now() - begin);
    const auto step = simulate_pipeline(pipeline_.schedule(std::ssize(batches_)));
    return {{"products", took}, {"floor", took / (1 - step.idle_share())}};
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

  Pipeline make(const gpt::Options& options) {
    using enum PipelineScheduleKind;
    const int64_t ranks = process_context().world_size();
    const auto kind = options.schedule;
    const int64_t chunks = kind == kGPipe || kind == k1F1B || kind == kZeroBubbleH1 ? 1 : 2;
    auto schedule = pipeline_schedule(kind, {.ranks = ranks, .micro_batches = options.micro_batches, .chunks = chunks});
    auto stages = split(layers_of(model_), init_device_mesh(torch::kCPU, {ranks}, {"pp"}),
                        {.rank_of_stage = schedule.rank_of_stage, .bounds = bounds_of(options.model.layers, schedule.stages())});
    return {std::move(stages), std::move(schedule), cross_entropy()};
  }

  Model model_;
  Pipeline pipeline_;
  FusedAdamW optimizer_;
  Products products_;
  std::vector<PipelineValue> batches_;
};

int run(const gpt::Options& options) {
  examples::join_job(options.threads);
  {
    PipelineStep step(options);
    serve({{"step", [&] { return step.run(); }}, {"products", [&] { return step.run_products(); }}});
  }
  destroy_process_group();
  return 0;
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("measure_pipeline_step", [&] { return tessera::benchmarks::run(gpt::parse_options(argc, argv)); });
}
