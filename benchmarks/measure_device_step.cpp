// Forward and backward of a GPT in bf16 on one CUDA device, driven by `benchmarks/compare` through standard input.
//
// Usage: measure_device_step KIND LAYERS WIDTH SEQUENCE BATCH, where KIND is sharded or per-parameter (fully_shard on a mesh of
// one rank), or autocast (nothing of Tessera's, and autocast in place of its mixed precision).
#include <ATen/autocast_mode.h>
#include <common/program.h>
#include <gpt/model.h>
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/mesh/device_mesh.h>

#include <chrono>
#include <string>

#include "device_meter.h"
#include "serve.h"

namespace tessera::benchmarks {
namespace {

constexpr int64_t kWidthOfHead = 128;

class DeviceStep {
 public:
  DeviceStep(const std::string& kind, const gpt::ModelConfig& config, int64_t batch)
      : device_(init_device_mesh(torch::kCUDA, {1}).device()), is_sharded_(kind != "autocast"), model_(config) {
    TORCH_CHECK(kind == "sharded" || kind == "per-parameter" || kind == "autocast", "there is no kind '", kind, "'");
    is_sharded_ ? shard(kind == "sharded" ? BufferLayout::kRagged : BufferLayout::kPerParameter) : model_->to(device_);
    const auto windows = torch::randint(gpt::kVocabulary, {batch, config.sequence + 1}, torch::kLong).to(device_);
    inputs_ = windows.narrow(1, 0, config.sequence);
    targets_ = windows.narrow(1, 1, config.sequence);
  }

  /// Seconds until the host has launched a forward and a backward, and until the device has done them.
  nlohmann::json run() {
    using Clock = std::chrono::steady_clock;
    const auto since = [begin = Clock::now()] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
    model_->zero_grad();
    forward().backward();
    const auto launched = since();
    synchronize(device_);
    return {{"host", launched}, {"device", since()}};
  }

  int64_t peak() const { return peak_bytes(device_); }

 private:
  void shard(BufferLayout layout) {
    const auto mesh = init_device_mesh(torch::kCUDA, {1}, {"shard"});
    FullyShardOptions options;
    options.layout = layout;
    options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    for (const auto& block : *model_->blocks()) fully_shard(*block, mesh, options);
    fully_shard(*model_, mesh, options);
  }

  torch::Tensor forward() {
    at::autocast::set_autocast_dtype(torch::kCUDA, torch::kBFloat16);
    at::autocast::set_autocast_enabled(torch::kCUDA, !is_sharded_);
    auto loss = gpt::cross_entropy(model_->forward(inputs_), targets_);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(torch::kCUDA, false);
    return loss;
  }

  c10::Device device_;
  bool is_sharded_;
  gpt::Gpt model_;
  torch::Tensor inputs_, targets_;
};

int run(int argc, char** argv) {
  TORCH_CHECK(argc == 6, "usage: measure_device_step KIND LAYERS WIDTH SEQUENCE BATCH");
  init_process_group();
  gpt::ModelConfig config;
  config.layers = std::stoll(argv[2]);
  config.width = std::stoll(argv[3]);
  config.heads = config.width / kWidthOfHead;
  config.sequence = std::stoll(argv[4]);
  {
    DeviceStep step(argv[1], config, std::stoll(argv[5]));
    serve({{"step", [&] { return step.run(); }}, {"peak", [&] { return step.peak(); }}});
  }
  destroy_process_group();
  return 0;
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("measure_device_step", [&] { return tessera::benchmarks::run(argc, argv); });
}
