// Trains from the last checkpoint (or from the start) up to a step, prints each loss, and saves.
//   checkpoint_resume_helper --ranks N ROOT STRATEGY LAST_STEP
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/collectives/launch.h>

#include <cstdio>

#include "sharded_training.h"

namespace {

void train(const std::filesystem::path& root, const std::string& strategy, int64_t last_step) {
  tessera::init_process_group();
  tessera::testing::TrainedModel model(1);
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : model.named_parameters()) {
    if (parameter.key() != "head") parameters.push_back(parameter.value());
  }
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.05));
  tessera::testing::shard(model, strategy);
  auto state = tessera::state_dict(model, optimizer);
  state.set("step", 0);
  if (std::filesystem::exists(root / "latest")) tessera::checkpoint::load(state, root / "latest");
  for (auto step = state.value<int64_t>("step"); step < last_step; ++step) {
    const auto loss = tessera::testing::train_step(model, optimizer, strategy, step);
    if (tessera::process_context().rank() == 0) std::printf("loss %ld %.9f\n", static_cast<long>(step), loss);
  }
  auto trained = tessera::state_dict(model, optimizer);
  trained.set("step", last_step);
  tessera::checkpoint::save(trained, root / ("step-" + std::to_string(last_step)));
  tessera::destroy_process_group();
}

} // namespace

int main(int argc, char** argv) {
  try {
    const auto ranks = tessera::ranks_from_args(argc, argv);
    TORCH_CHECK(ranks && argc == 6, "usage: checkpoint_resume_helper --ranks N ROOT STRATEGY LAST_STEP");
    return tessera::launch(*ranks, [&] { train(argv[3], argv[4], std::stoll(argv[5])); });
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  }
  return 1;
}
