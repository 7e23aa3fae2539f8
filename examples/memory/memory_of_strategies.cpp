// What a rank holds of a GPT with 700 million parameters under each strategy, as `tessera::explain` predicts it for a step with
// AdamW, without activations. The model is on the meta device and all ranks but this one are pretended, so it needs no memory.
//
//   build/release/bin/memory_of_strategies [--ranks N] [--bf16]     N is even; 8 by default

#include <tessera/tessera.h>
#include <torch/torch.h>

#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <string_view>

#include "common/program.h"
#include "gpt/model.h"

namespace {

struct Arguments {
  int ranks = 8;
  bool bf16 = false;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name(argv[i]);
    if (name == "--bf16") {
      arguments.bf16 = true;
    } else {
      TORCH_CHECK(name == "--ranks" && i + 1 < argc, "the argument ", name,
                  " is unknown; usage: memory_of_strategies [--ranks N] [--bf16]");
      arguments.ranks = std::atoi(argv[++i]);
      TORCH_CHECK(arguments.ranks > 0 && arguments.ranks % 2 == 0, "--ranks is '", argv[i], "', but must be an even number");
    }
  }
  return arguments;
}

/// Two hosts with half of the ranks each, where the strategy tells hosts apart.
tessera::DeviceMesh mesh_for(const tessera::StrategyRow& row, int64_t ranks) {
  return row.outer ? tessera::init_device_mesh(torch::kMeta, {2, ranks / 2}, {"replicate", "shard"})
                   : tessera::init_device_mesh(torch::kMeta, {ranks}, {"shard"});
}

gpt::Gpt make_model() {
  const gpt::ModelConfig config{.layers = 18, .width = 1792, .heads = 14, .sequence = 1024};
  return tessera::on_meta([&] { return gpt::Gpt(config); });
}

void shard(gpt::Gpt& model, const tessera::StrategyRow& row, const Arguments& arguments) {
  const auto mesh = mesh_for(row, arguments.ranks);
  tessera::FullyShardOptions options{.strategy = row.strategy};
  if (arguments.bf16) {
    options.mixed_precision.param_dtype = torch::kBFloat16;
    options.mixed_precision.reduce_dtype = torch::kFloat32;
  }
  if (row.strategy == tessera::Strategy::kNoShard) {
    tessera::replicate(model, mesh, options);
    return;
  }
  for (auto& block : *model->blocks()) tessera::fully_shard(*block, mesh, options);
  tessera::fully_shard(model, mesh, options);
}

double gib(int64_t bytes) { return static_cast<double>(bytes) / (1LL << 30); }

void print_row(const tessera::StrategyRow& row, const Arguments& arguments) {
  auto model = make_model();
  shard(model, row, arguments);
  auto memory = tessera::explain(*model, {.optimizer_tensors = 2}).memory;
  memory.peak_at.resize(std::min(memory.peak_at.size(), memory.peak_at.find(" of model"))); // of this process
  std::cout << fmt::format("{:<13}{:>11.2f}{:>11.2f}{:>10.2f}{:>10.2f}{:>9.2f}{:>12.2f}{:>7.2f}  {}\n", row.name,
                           gib(memory.parameters), gib(memory.optimizer_state), gib(memory.gradients), gib(memory.unsharded),
                           gib(memory.reduce_buffers), gib(memory.temporaries), gib(memory.peak), memory.peak_at);
}

int run(const Arguments& arguments) {
  tessera::init_fake_process_group(/*rank=*/0, arguments.ranks);
  int64_t elements = 0;
  for (const auto& parameter : make_model()->parameters()) elements += parameter.numel();
  std::cout << fmt::format("{:.1f} million parameters, {} ranks, {}; GiB of a rank at its peak\n", elements / 1e6,
                           arguments.ranks, arguments.bf16 ? "bf16 with fp32 shards and reductions" : "fp32");
  std::cout << fmt::format("{:<13}{:>11}{:>11}{:>10}{:>10}{:>9}{:>12}{:>7}  {}\n", "strategy", "parameters", "optimizer",
                           "gradients", "unsharded", "reduced", "temporaries", "peak", "at");
  for (const auto& row : tessera::kStrategies) print_row(row, arguments);
  tessera::destroy_process_group();
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("memory_of_strategies", [&] { return run(parse(argc, argv)); });
}
