// Measures a model of one's own under strategies, layouts, precisions and more, as tessera-bench does its models:
//
//   build/release/bin/bench_own_model --ranks 1,2 --strategy no-shard,zero-2,full --recompute false,true --out runs/own.json
//   build/release/bin/tessera-report runs/own.json --out runs/own
#include <tessera/activations/recompute.h>
#include <tessera/benchmarks/bench.h>
#include <torch/torch.h>

namespace {

using tessera::BenchPlace;
using tessera::BenchSettings;
namespace nn = torch::nn;

/// x + down(silu(up(norm(x)))).
struct LayerImpl : nn::Module {
  explicit LayerImpl(int64_t width)
      : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))),
        up(register_module("up", nn::Linear(width, 2 * width))),
        down(register_module("down", nn::Linear(2 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::silu(up(norm(x)))); }
  nn::LayerNorm norm;
  nn::Linear up, down;
};
TORCH_MODULE(Layer);

/// `layers` of them between rows of numbers and a number a row.
tessera::BenchModel make_model(const BenchSettings& settings) {
  nn::Sequential layers;
  for (int64_t i = 0; i < settings.layers; ++i) layers->push_back(Layer(settings.width));
  const auto run = [layers, recomputes = settings.recompute](torch::Tensor x) {
    for (const auto& each : *layers) {
      auto& layer = *each.ptr()->as<Layer>();
      x = recomputes ? tessera::recompute(layer, x) : layer.forward(x);
    }
    return x;
  };
  const auto loss = [run](const std::vector<torch::Tensor>& batch) { return torch::mse_loss(run(batch[0]).mean(1), batch[1]); };
  std::vector<std::shared_ptr<nn::Module>> blocks;
  for (const auto& each : *layers) blocks.push_back(each.ptr());
  return {layers.ptr(), blocks, loss};
}

/// Rows that depend on the rank and the step alone.
std::vector<torch::Tensor> make_batch(const BenchSettings& settings, const BenchPlace& place) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(place.step * place.ranks + place.rank));
  const auto x = torch::randn({settings.batch, settings.width}, generator);
  return {x, x.sin().sum(1)};
}

} // namespace

int main(int argc, char** argv) {
  tessera::BenchModels models;
  models.add("own", {.model = make_model, .batch = make_batch});
  return tessera::bench_main(argc, argv, models);
}
