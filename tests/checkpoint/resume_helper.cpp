// Trains from the last checkpoint (or from the start) up to a step, prints each loss, and saves.
//   checkpoint_resume_helper --ranks N ROOT STRATEGY LAST_STEP adamw|Lion|…
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/collectives/launch.h>

#include <cstdio>

#include "own_training.h"

namespace {

using tessera::testing::OwnTraining;

class AdamWTraining : public OwnTraining {
 public:
  explicit AdamWTraining(const std::string& strategy) : training_(strategy, 1) {}
  double step(int64_t number) override { return training_.step(number); }
  tessera::StateDict state(const tessera::StateDictOptions& /*options*/) override { return training_.state(); }

 private:
  tessera::testing::Training training_;
};

std::unique_ptr<OwnTraining> make(const std::string& name, const std::string& strategy) {
  if (name == "adamw") return std::make_unique<AdamWTraining>(strategy);
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  return tessera::testing::make_training(name, strategy, 1);
}

void train(const std::filesystem::path& root, const std::string& strategy, int64_t last_step, const std::string& name) {
  tessera::init_process_group();
  const auto training = make(name, strategy);
  auto state = training->state();
  state.set("step", 0);
  if (std::filesystem::exists(root / "latest")) tessera::checkpoint::load(state, root / "latest");
  for (auto step = state.value<int64_t>("step"); step < last_step; ++step) {
    const auto loss = training->step(step);
    if (tessera::process_context().rank() == 0) std::printf("loss %ld %.17g\n", static_cast<long>(step), loss);
  }
  auto trained = training->state();
  trained.set("step", last_step);
  tessera::checkpoint::save(trained, root / ("step-" + std::to_string(last_step)));
  tessera::destroy_process_group();
}

} // namespace

int main(int argc, char** argv) {
  try {
    const auto ranks = tessera::ranks_from_args(argc, argv);
    TORCH_CHECK(ranks && argc == 7, "usage: checkpoint_resume_helper --ranks N ROOT STRATEGY LAST_STEP TRAINING");
    return tessera::launch(*ranks, [&] { train(argv[3], argv[4], std::stoll(argv[5]), argv[6]); });
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  }
  return 1;
}
