// simulated_cluster [--layers N] [--length N] [--flops N] [--topology FILE] [RANKS ...]
// Mesh, fully_shard and a training step of a Llama 3 70B on the meta device, as one rank of simulated ones: a row a number of
// ranks (by default 8, 64, 512, 4096, 65536), with the library's own time and memory on this rank, and the predicted step.
// "library" is what sharding adds to the same steps of the same model unsharded. A topology file gives nodes and links; its
// number of ranks is replaced.
#include <common/program.h>
#include <malloc.h>
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/mesh/device_mesh.h>

#include <charconv>
#include <chrono>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "llama.h"

namespace tessera::benchmarks {
namespace {

struct Options {
  LlamaShape shape;
  int64_t length = 8192;
  // H100s: eight a node, of which NVLink gives a rank 360 GB/s in collectives, and eight adapters of 400 Gbit/s a node; 40 % of
  // the peak rate of bf16.
  double flops_per_second = 0.4 * 989e12;
  Topology topology{.ranks_per_node = 8,
                    .in_node = {3e-6, 1 / 360e9, Link::Algorithm::kRing},
                    .between_nodes = {1e-5, 1 / 400e9, Link::Algorithm::kRecursive}};
  std::vector<int64_t> ranks;
};

/// This process's time, and the memory that it holds more at the end than at the begin.
struct Cost {
  double seconds = 0;
  int64_t bytes = 0;
};

int64_t heap_bytes() {
  const auto info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

template <typename Work>
Cost cost_of(const Work& work) {
  using Clock = std::chrono::steady_clock;
  const auto before = heap_bytes();
  const auto begin = Clock::now();
  work();
  const auto seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return {seconds, heap_bytes() - before};
}

/// A step on tokens of the meta device.
class Training {
 public:
  Training(Llama model, int64_t length)
      : model_(std::move(model)),
        optimizer_(model_->parameters(), torch::optim::AdamWOptions(3e-4)),
        tokens_(torch::empty({1, length}, torch::TensorOptions(torch::kLong).device(torch::kMeta))) {}

  void step() {
    optimizer_.zero_grad();
    const auto logits = model_->forward(tokens_);
    torch::nn::functional::cross_entropy(logits.flatten(0, 1), tokens_.flatten()).backward();
    optimizer_.step();
  }
  /// The fastest of a few, after one that makes what stays.
  Cost measured_step() {
    Cost cost;
    const auto first = cost_of([&] { step(); });
    cost = cost_of([&] { step(); });
    cost.bytes += first.bytes;
    for (int i = 0; i < 2; ++i) cost.seconds = std::min(cost.seconds, cost_of([&] { step(); }).seconds);
    return cost;
  }

 private:
  Llama model_;
  torch::optim::AdamW optimizer_;
  torch::Tensor tokens_;
};

Llama make_model(const LlamaShape& shape) {
  return on_meta([&] { return Llama(shape); });
}

void shard(Llama& model, const DeviceMesh& mesh) {
  const FullyShardOptions options{.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}};
  for (const auto& block : *model->blocks) fully_shard(*block, mesh, options);
  fully_shard(*model, mesh, options);
  materialize(*model, [](torch::nn::Module&) {});
}

std::string text(const Cost& cost) {
  return fmt::format("{:.4g} ms, {:.4g} KiB", 1e3 * cost.seconds, static_cast<double>(cost.bytes) / 1024);
}

void print_row(const Options& options, int64_t ranks, const Cost& plain) {
  auto topology = options.topology;
  topology.ranks = ranks;
  init_simulated_process_group(topology, /*rank=*/0, {.flops_per_second = options.flops_per_second});
  auto model = make_model(options.shape);
  DeviceMesh mesh;
  const auto making = cost_of([&] { mesh = init_device_mesh(torch::kMeta, {ranks}, {"shard"}); });
  const auto sharding = cost_of([&] { shard(model, mesh); });
  Training training(model, options.length);
  auto step = training.measured_step();
  step.seconds -= plain.seconds;
  step.bytes -= plain.bytes;
  simulated_clock().reset();
  training.step();
  const auto time = simulated_clock().elapsed();
  std::cout << fmt::format("| {} | {} | {} | {} | {:.4g} s | {:.4g} s | {:.4g} s |", ranks, text(making), text(sharding),
                           text(step), time.total, time.compute, time.exposed)
            << std::endl;
}

int run(const Options& options) {
  torch::manual_seed(1);
  at::set_num_threads(1);
  const auto plain = Training(make_model(options.shape), options.length).measured_step();
  std::cout
      << "| ranks | mesh | fully_shard | step, library | predicted step | compute | exposed |\n|---|---|---|---|---|---|---|\n";
  for (const auto ranks : options.ranks) {
    print_row(options, ranks, plain);
    destroy_process_group();
  }
  return 0;
}

/// The positive number that `text` is, the value of what is called `name`.
template <typename Number>
Number number_of(const std::string& name, const std::string& text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  TORCH_CHECK(is_number && number > 0, name, " is '", text, "', but must be a positive number");
  return number;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string {
      TORCH_CHECK(i + 1 < argc, name, " needs a value");
      return argv[++i];
    };
    if (name == "--layers") {
      options.shape.layers = number_of<int64_t>(name, value());
    } else if (name == "--length") {
      options.length = number_of<int64_t>(name, value());
    } else if (name == "--flops") {
      options.flops_per_second = number_of<double>(name, value());
    } else if (name == "--topology") {
      options.topology = Topology::read(value());
    } else {
      TORCH_CHECK(!name.empty() && name.find_first_not_of("0123456789") == std::string::npos, "unknown argument ", name,
                  ". Usage: simulated_cluster [--topology FILE] [--flops RATE] [--length TOKENS] [--layers N] [RANKS...]");
      options.ranks.push_back(number_of<int64_t>("RANKS", name));
    }
  }
  if (options.ranks.empty()) options.ranks = {8, 64, 512, 4096, 65536};
  return options;
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("simulated_cluster",
                               [&] { return tessera::benchmarks::run(tessera::benchmarks::parse(argc, argv)); });
}
