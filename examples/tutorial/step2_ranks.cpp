// Step 2 of docs/tutorial.md: the same program on several ranks. Every rank holds the whole model and takes its share of each
// batch.
//
//   build/release/bin/tutorial_step2_ranks --ranks 4

#include <tessera/tessera.h>

#include "tutorial/model.h"
#include "tutorial/ranks.h"

static void worker() {
  tessera::init_process_group();
  const auto mesh = tessera::init_device_mesh(torch::kCPU, {tessera::process_context().world_size()});

  torch::manual_seed(0); // the same initial weights on every rank
  tutorial::Model model;
  tessera::replicate(*model, mesh);
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);

  for (int64_t step = 0; step < tutorial::kSteps; ++step) {
    const auto [x, y] = tutorial::share_of_batch(step, mesh);
    auto loss = torch::mse_loss(model->forward(x), y);
    optimizer.zero_grad();
    loss.backward(); // averages the gradients over the ranks
    optimizer.step();
    tutorial::report(step, loss, mesh);
  }
  tessera::destroy_process_group();
}

int main(int argc, char** argv) { return tutorial::run(argc, argv, worker); }
