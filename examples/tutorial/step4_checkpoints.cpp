// Step 4 of docs/tutorial.md: every run trains 25 steps, from the newest checkpoint in runs/tutorial where there is one. The next
// run may have any number of ranks.
//
//   build/release/bin/tutorial_step4_checkpoints --ranks 4
//   build/release/bin/tutorial_step4_checkpoints --ranks 2

#include <tessera/tessera.h>

#include <filesystem>
#include <string>

#include "tutorial/model.h"
#include "tutorial/ranks.h"

static void worker() {
  tessera::init_process_group();
  const auto mesh = tessera::init_device_mesh(torch::kCPU, {tessera::process_context().world_size()});

  torch::manual_seed(0);
  tutorial::Model model;
  for (auto& block : model->blocks) tessera::fully_shard(block, mesh);
  tessera::fully_shard(model, mesh);
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);

  const std::filesystem::path runs = "runs/tutorial";
  auto state = tessera::state_dict(*model, optimizer);
  state.set("step", 0);
  if (const auto newest = tessera::checkpoint::latest(runs); !newest.empty()) tessera::checkpoint::load(state, newest);

  const auto first = state.value<int64_t>("step"), last = first + 25;
  for (int64_t step = first; step < last; ++step) {
    const auto [x, y] = tutorial::share_of_batch(step, mesh);
    auto loss = torch::mse_loss(model->forward(x), y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    tutorial::report(step, loss, mesh);
  }
  state = tessera::state_dict(*model, optimizer); // the optimizer has its moments now
  state.set("step", last);
  tessera::checkpoint::save(state, runs / ("step-" + std::to_string(last)));
  tessera::destroy_process_group();
}

int main(int argc, char** argv) { return tutorial::run(argc, argv, worker); }
