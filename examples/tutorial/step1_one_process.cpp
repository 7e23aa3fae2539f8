// Step 1 of docs/tutorial.md: a LibTorch program of one process.

#include <cstdio>

#include "tutorial/model.h"

int main() {
  torch::manual_seed(0);
  tutorial::Model model;
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);

  for (int64_t step = 0; step < tutorial::kSteps; ++step) {
    const auto [x, y] = tutorial::batch(step);
    auto loss = torch::mse_loss(model->forward(x), y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step % 10 == 9) std::printf("step %2ld  loss %.4f\n", static_cast<long>(step + 1), loss.item<double>());
  }
}
