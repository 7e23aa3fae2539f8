// Step 5 of docs/tutorial.md: what a model takes that no rank can hold whole. It is built without memory, computes in bf16, and
// is sharded inside a host and replicated over hosts.
//
//   build/release/bin/tutorial_step5_large_models --ranks 4

#include <tessera/tessera.h>

#include "tutorial/model.h"
#include "tutorial/ranks.h"

/// Linear layers initialize themselves, here each rank its part.
static void initialize(torch::nn::Module& module) {
  if (auto* linear = module.as<torch::nn::Linear>()) linear->reset_parameters();
}

static void worker() {
  tessera::init_process_group();
  const auto ranks = tessera::process_context().world_size();
  const int64_t hosts = ranks % 2 == 0 ? 2 : 1;
  const auto mesh = tessera::init_device_mesh(torch::kCPU, {hosts, ranks / hosts}, {"replicate", "shard"});

  tessera::FullyShardOptions options;
  options.mixed_precision.param_dtype = torch::kBFloat16; // forward, backward and the all-gather
  options.mixed_precision.reduce_dtype = torch::kFloat32; // sums of gradients; the optimizer sees fp32 throughout

  torch::manual_seed(0);
  auto model = tessera::on_meta([] { return tutorial::Model(); }); // shapes, no memory
  for (auto& block : model->blocks) tessera::fully_shard(block, mesh, options);
  tessera::fully_shard(model, mesh, options);
  tessera::materialize(*model, initialize); // memory for this rank's part, and its values
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);

  for (int64_t step = 0; step < tutorial::kSteps; ++step) {
    const auto [x, y] = tutorial::share_of_batch(step, mesh);
    auto loss = torch::mse_loss(model->forward(x).to(torch::kFloat32), y);
    optimizer.zero_grad();
    loss.backward();
    tessera::clip_grad_norm_(*model, 1.0); // the norm of the whole gradient
    optimizer.step();
    tutorial::report(step, loss, mesh);
  }
  tessera::destroy_process_group();
}

int main(int argc, char** argv) { return tutorial::run(argc, argv, worker); }
