// Step 3 of docs/tutorial.md: each rank holds a part of the parameters, gradients and optimizer state.
//
//   build/release/bin/tutorial_step3_sharded --ranks 4

#include <tessera/tessera.h>

#include "tutorial/model.h"
#include "tutorial/ranks.h"

static void worker() {
  tessera::init_process_group();
  const auto mesh = tessera::init_device_mesh(torch::kCPU, {tessera::process_context().world_size()});

  torch::manual_seed(0);
  tutorial::Model model;
  for (auto& block : model->blocks) tessera::fully_shard(block, mesh); // the blocks first,
  tessera::fully_shard(model, mesh);                                   // then the root with what is left
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);

  for (int64_t step = 0; step < tutorial::kSteps; ++step) {
    const auto [x, y] = tutorial::share_of_batch(step, mesh);
    auto loss = torch::mse_loss(model->forward(x), y); // gathers each block before its first read
    optimizer.zero_grad();
    loss.backward();  // gathers again, and leaves each rank its part of the mean gradient
    optimizer.step(); // on this rank's part
    tutorial::report(step, loss, mesh);
  }
  tessera::destroy_process_group();
}

int main(int argc, char** argv) { return tutorial::run(argc, argv, worker); }
