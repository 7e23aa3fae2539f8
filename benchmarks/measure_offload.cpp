// One rank of a training whose state lies in files, or in memory, driven by `benchmarks/compare` through standard input.
//
// Usage: measure_offload FOLDER BLOCKS WIDTH   (an empty folder: in memory)
#include <common/program.h>
#include <common/ranks.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/step.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <string>

#include "serve.h"

namespace tessera::benchmarks {
namespace {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Residual blocks that learn to map random rows to others, with AdamW. Each block is sharded before the next is made.
class Training {
 public:
  Training(const std::string& folder, int64_t blocks, int64_t width) {
    const auto mesh = init_device_mesh(torch::kCPU, {process_context().world_size()});
    FullyShardOptions options{.initial_weights = InitialWeights::kUnchecked};
    if (!folder.empty()) options.offload = offload_to_files(folder);
    torch::manual_seed(0);
    for (int64_t i = 0; i < blocks; ++i) {
      Block block(width);
      fully_shard(block, mesh, options);
      blocks_->push_back(block);
    }
    fully_shard(*blocks_, mesh, options);
    optimizer_ = std::make_unique<torch::optim::AdamW>(blocks_->parameters(), 1e-4);
    torch::manual_seed(process_context().rank());
    inputs_ = torch::randn({16, width});
    targets_ = torch::randn({16, width});
  }

  nlohmann::json step() {
    torch::Tensor loss;
    optimizer_->zero_grad();
    const auto forward = seconds_of([&] {
      auto x = inputs_;
      for (auto& block : *blocks_) x = block->as<Block>()->forward(x);
      loss = torch::mse_loss(x, targets_);
    });
    const auto backward = seconds_of([&] { loss.backward(); });
    const auto optimizer = seconds_of([&] { tessera::step(*optimizer_); });
    return {{"loss", loss.item<double>()}, {"forward", forward}, {"backward", backward}, {"optimizer", optimizer}};
  }

  /// Bytes of this rank's parameters.
  nlohmann::json parameter_bytes() const {
    int64_t bytes = 0;
    for (const auto& parameter : blocks_->parameters()) bytes += static_cast<int64_t>(DTensor(parameter).local().nbytes());
    return bytes;
  }

 private:
  torch::nn::ModuleList blocks_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  torch::Tensor inputs_, targets_;
};

int run(int argc, char** argv) {
  TORCH_CHECK(argc == 4, "usage: measure_offload FOLDER BLOCKS WIDTH");
  examples::join_job(1);
  {
    Training training(argv[1], std::stoll(argv[2]), std::stoll(argv[3]));
    serve({{"step", [&] { return training.step(); }}, {"parameter_bytes", [&] { return training.parameter_bytes(); }}});
  }
  destroy_process_group();
  return 0;
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("measure_offload", [&] { return tessera::benchmarks::run(argc, argv); });
}
