// Two optimizers in one run: Lion, which lion.h defines, for the matrices, and AdamW for the biases. Every run trains 25 steps of
// the tutorial's model, from the newest checkpoint in runs/lion where there is one. The next run may have any number of ranks.
//
//   build/release/bin/train_lion --ranks 4
//   build/release/bin/train_lion --ranks 2

#include "lion/lion.h"

#include <filesystem>
#include <string>

#include "tutorial/model.h"
#include "tutorial/ranks.h"

static void worker() {
  tessera::init_process_group();
  lion::register_lion();
  const auto mesh = tessera::init_device_mesh(torch::kCPU, {tessera::process_context().world_size()});
  // The sign of a gradient near zero depends on rounding, and so would the losses on the number of ranks.
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());

  torch::manual_seed(0);
  tutorial::Model model;
  for (auto& block : model->blocks) tessera::fully_shard(block, mesh);
  tessera::fully_shard(model, mesh);
  std::vector<torch::Tensor> matrices, biases;
  for (const auto& parameter : model->parameters()) (parameter.dim() == 2 ? matrices : biases).push_back(parameter);
  lion::Lion lion(matrices, lion::LionOptions(2e-4).weight_decay(0.1));
  torch::optim::AdamW adamw(biases, 1e-3);

  const std::filesystem::path runs = "runs/lion";
  auto state = tessera::state_dict(*model, {{"lion", lion}, {"adamw", adamw}});
  state.set("step", 0);
  if (const auto newest = tessera::checkpoint::latest(runs); !newest.empty()) tessera::checkpoint::load(state, newest);

  const auto first = state.value<int64_t>("step"), last = first + 25;
  for (int64_t step = first; step < last; ++step) {
    const auto [x, y] = tutorial::share_of_batch(step, mesh);
    auto loss = torch::mse_loss(model->forward(x), y);
    model->zero_grad();
    loss.backward();
    lion.step();
    adamw.step();
    tutorial::report(step, loss, mesh);
  }
  state = tessera::state_dict(*model, {{"lion", lion}, {"adamw", adamw}}); // they have their moments now
  state.set("step", last);
  tessera::checkpoint::save(state, runs / ("step-" + std::to_string(last)));
  tessera::destroy_process_group();
}

int main(int argc, char** argv) { return tutorial::run(argc, argv, worker); }
