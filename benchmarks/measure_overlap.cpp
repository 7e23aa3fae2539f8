// One rank of a tensor-parallel training step whose sequences are split, driven by `benchmarks/compare` through standard input:
// with layers apart from their collectives, in chunks beside them, and as is measured to be faster. Takes the flags of train_gpt.
#include <common/program.h>
#include <common/ranks.h>
#include <gpt/model.h>
#include <gpt/options.h>
#include <gpt/sharding.h>
#include <tessera/collectives/process_context.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/parallelize.h>
#include <torch/torch.h>

#include <chrono>

#include "serve.h"

namespace tessera::benchmarks {
namespace {

/// Forward and backward of a GPT on random bytes.
class Step {
 public:
  Step(const gpt::Options& options, const DeviceMesh& mesh, Overlap overlap) : model_(options.model) {
    parallelize(*model_, mesh, gpt::parallel_plan(/*sequence_parallel=*/true, /*has_experts=*/false),
                {.overlap = {.when = overlap}});
    torch::manual_seed(options.seed);
    const auto windows = torch::randint(gpt::kVocabulary, {options.batch, options.model.sequence + 1}, torch::kLong);
    inputs_ = windows.narrow(1, 0, options.model.sequence).contiguous();
    targets_ = windows.narrow(1, 1, options.model.sequence).contiguous();
  }

  nlohmann::json run() {
    const auto begin = std::chrono::steady_clock::now();
    model_->zero_grad();
    gpt::cross_entropy(model_->forward(inputs_), targets_).backward();
    return {{"step", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}};
  }

 private:
  gpt::Gpt model_;
  torch::Tensor inputs_, targets_;
};

nlohmann::json decisions() {
  int64_t overlapping = 0, all = 0;
  for (const auto& each : overlap_decisions()) {
    ++all;
    overlapping += each.overlaps ? 1 : 0;
  }
  return {{"sizes", all}, {"overlapping", overlapping}};
}

int run(const gpt::Options& options) {
  examples::join_job(options.threads);
  {
    const auto mesh = init_device_mesh(torch::kCPU, {process_context().world_size()}, {"tp"});
    Step apart(options, mesh, Overlap::kNever), chunks(options, mesh, Overlap::kAlways),
        chosen(options, mesh, Overlap::kMeasured);
    serve({{"apart", [&] { return apart.run(); }},
           {"chunks", [&] { return chunks.run(); }},
           {"measured", [&] { return chosen.run(); }},
           {"decisions", [&] { return decisions(); }}});
  }
  destroy_process_group();
  return 0;
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("measure_overlap", [&] { return tessera::benchmarks::run(gpt::parse_options(argc, argv)); });
}
