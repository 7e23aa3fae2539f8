// The host's cost of sharding: forward and backward of 25 groups of small parameters, sharded and not sharded at all. Driven by
// `benchmarks/compare` through standard input.
//
// Usage: measure_overhead [RANKS [PARAMETERS [DEVICE]]]: of a job whose other ranks do not exist; of a group, 9 or more; cpu or
// cuda, whose host's time alone counts.
#include <common/program.h>
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/mesh/device_mesh.h>
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "device_meter.h"
#include "median.h"
#include "serve.h"

namespace tessera::benchmarks {
namespace {

constexpr int kGroups = 25;
constexpr int kRepetitions = 5;
constexpr int64_t kWidth = 16, kBatch = 4;

// Four layers with biases, and scales: nine parameters or more.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(int parameters) {
    for (int i = 0; i < 4; ++i) layers_->push_back(torch::nn::Linear(kWidth, kWidth));
    register_module("layers", layers_);
    for (int i = 0; i < parameters - 8; ++i) {
      scales_.push_back(register_parameter("scale" + std::to_string(i), torch::ones({kWidth})));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    auto y = x;
    for (const auto& layer : *layers_) y = torch::tanh(layer->as<torch::nn::Linear>()->forward(y));
    for (const auto& scale : scales_) y = y * scale;
    return x + y;
  }

 private:
  torch::nn::ModuleList layers_;
  std::vector<torch::Tensor> scales_;
};
TORCH_MODULE(Block);

class StackImpl : public torch::nn::Module {
 public:
  explicit StackImpl(int parameters) {
    for (int i = 0; i < kGroups; ++i) blocks->push_back(Block(parameters));
    register_module("blocks", blocks);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Stack);

// The root's group is the last block's parameters: 25 groups.
void shard(Stack& stack, const DeviceMesh& mesh, const FullyShardOptions& options) {
  for (int i = 0; i + 1 < kGroups; ++i) fully_shard(*stack->blocks[i], mesh, options);
  fully_shard(*stack, mesh, options);
}

double seconds_of_one(Stack& stack, const torch::Tensor& input) {
  stack->zero_grad();
  synchronize(input.device());
  const auto begin = std::chrono::steady_clock::now();
  stack->forward(input).sum().backward();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The median of a few, after one that warms the caches: another program ran in between.
double seconds_of_forward_and_backward(Stack& stack, const torch::Tensor& input) {
  seconds_of_one(stack, input);
  std::vector<double> seconds(kRepetitions);
  for (auto& one : seconds) one = seconds_of_one(stack, input);
  return median(std::move(seconds));
}

/// With a report of the last step, which counts as a part of it.
double seconds_with_report(Stack& stack, const torch::Tensor& input) {
  auto module = fsdp(*stack);
  module.set_reporting(true);
  const auto seconds = seconds_of_forward_and_backward(stack, input);
  module.report();
  seconds_of_one(stack, input);
  const auto begin = std::chrono::steady_clock::now();
  module.report();
  const auto end = std::chrono::steady_clock::now();
  module.set_reporting(false);
  return seconds + std::chrono::duration<double>(end - begin).count();
}

void answer(int ranks, int parameters, c10::DeviceType device_type) {
  TORCH_CHECK(parameters >= 9, "there are ", parameters, " parameters a group, but must be at least 9");
  const auto mesh = init_device_mesh(device_type, {ranks}, {"shard"});
  Stack plain(parameters), ragged(parameters), per_parameter(parameters);
  shard(ragged, mesh, {.layout = BufferLayout::kRagged});
  shard(per_parameter, mesh, {.layout = BufferLayout::kPerParameter});
  plain->to(mesh.device());
  const auto input = torch::randn({kBatch, kWidth}).to(mesh.device());
  serve({{"plain", [&] { return seconds_of_forward_and_backward(plain, input); }},
         {"ragged", [&] { return seconds_of_forward_and_backward(ragged, input); }},
         {"ragged with a report", [&] { return seconds_with_report(ragged, input); }},
         {"per-parameter", [&] { return seconds_of_forward_and_backward(per_parameter, input); }}});
}

int run(int argc, char** argv) {
  const int ranks = argc > 1 ? std::stoi(argv[1]) : 1;
  at::set_num_threads(1);
  init_fake_process_group(/*rank=*/0, ranks);
  const bool on_cuda = argc > 3 && std::string(argv[3]) == "cuda";
  answer(ranks, argc > 2 ? std::stoi(argv[2]) : 9, on_cuda ? torch::kCUDA : torch::kCPU);
  destroy_process_group();
  return 0;
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("measure_overhead", [&] { return tessera::benchmarks::run(argc, argv); });
}
