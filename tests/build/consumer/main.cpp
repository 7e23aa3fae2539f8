#include <ATen/ops/randn.h>
#include <tessera/checkpoint.h>
#include <tessera/collectives.h>
#include <tessera/fsdp.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cstdio>

// Trains a sharded layer as a job of one rank, and saves it twice in one place; fails unless the loss falls.
int main() {
  tessera::init_process_group();
  const auto mesh = tessera::init_device_mesh(at::kCPU, {1}, {"shard"});
  torch::nn::Linear model(8, 4);
  tessera::fully_shard(*model, mesh);
  torch::optim::AdamW optimizer(model->parameters(), 0.1);
  const auto input = at::randn({16, 8});
  double first = 0;
  double last = 0;
  for (int step = 0; step < 10; ++step) {
    const auto loss = model->forward(input).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  for (int save = 0; save < 2; ++save)
    tessera::checkpoint::save(tessera::state_dict(*model, optimizer), "checkpoint", {.overwrite = true});
  tessera::destroy_process_group();
  std::printf("%s: loss %.4f, then %.4f\n", mesh.to_string().c_str(), first, last);
  return last < first ? 0 : 1;
}
