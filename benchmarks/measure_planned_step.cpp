// What `plan` predicts, and the steps that it predicts, driven by `benchmarks/compare` through standard input:
//
//   measure_planned_step machine                       prints this machine, measured by the ranks of the job
//   measure_planned_step fit MACHINE SETTINGS SECONDS ...  prints the machine, fitted to steps that took so long
//   measure_planned_step predict MACHINE SETTINGS ...  a line of JSON for each settings
//   measure_planned_step run SETTINGS                  a rank of a real job: answers "step" with its seconds
//
// MACHINE is JSON, and SETTINGS too: {"replicate": 1, "shard": 2, "tp": 1, "strategy": "full", "precision": "fp32", "rows": 2,
// "accumulation": 1, "recompute": false, "optimizer": "AdamW", "layers": 4, "width": 256}.
#include <common/program.h>
#include <tessera/collectives/process_context.h>
#include <tessera/plan/fit_machine.h>
#include <tessera/plan/prediction.h>
#include <tessera/plan/step/planned_step.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <string>
#include <vector>

#include <gpt/model.h>
#include <gpt/sharding.h>
#include "serve.h"

namespace tessera::benchmarks {
namespace {

using nlohmann::json;

constexpr int64_t kSequence = 128;

PlannedModel planned_gpt(const json& settings) {
  const gpt::ModelConfig config{.layers = settings.value("layers", int64_t{4}),
                                .width = settings.value("width", int64_t{256}),
                                .heads = 4,
                                .sequence = kSequence};
  PlannedModel model{.name = "GPT"};
  model.build = [config] { return gpt::Gpt(config).ptr(); };
  model.groups = {"blocks.*"};
  model.batch = [](const PassSettings& pass, at::Device device) {
    return PipelineValue(torch::zeros({pass.rows, kSequence}, torch::TensorOptions(torch::kLong).device(device)));
  };
  model.loss = [](torch::nn::Module& module, const PipelineValue& batch, const PassSettings& pass) {
    auto& net = *module.as<gpt::GptImpl>();
    net.set_recompute(pass.recompute);
    return gpt::cross_entropy(net.forward(batch.toTensor()), batch.toTensor());
  };
  model.tensor_parallel = [](torch::nn::Module&, const PlanOptions& options) {
    return gpt::parallel_plan(options.sequence, false);
  };
  model.sequence = kSequence;
  return model;
}

PlanSettings settings_of(const json& read) {
  const auto name = read.value("strategy", std::string("full"));
  const auto row = std::find_if(kStrategies.begin(), kStrategies.end(), [&](const auto& each) { return each.name == name; });
  TORCH_CHECK(row != kStrategies.end(), "strategy is ", name);
  PlanSettings settings{.strategy = row->strategy, .precision = plan_precision(read.value("precision", std::string("fp32")))};
  settings.mesh = {.replicate = read.value("replicate", int64_t{1}),
                   .shard = read.value("shard", int64_t{1}),
                   .tp = read.value("tp", int64_t{1})};
  settings.rows = read.value("rows", int64_t{1});
  settings.accumulation = read.value("accumulation", int64_t{1});
  settings.recompute = read.value("recompute", false);
  settings.optimizer = read.value("optimizer", std::string("AdamW"));
  return settings;
}

void print_machine() {
  const auto machine = measure_machine();
  if (process_context().rank() == 0) std::cout << json::parse(machine.to_json()).dump() << std::endl;
}

void print_prediction(const std::string& machine, const json& settings) {
  const auto prediction = predict(planned_gpt(settings), Machine::from_json(machine), settings_of(settings));
  std::cout << json::parse(prediction.to_json()).dump() << std::endl;
}

void print_fitted(const std::string& text, const std::vector<std::string>& steps) {
  const auto machine = Machine::from_json(text);
  std::vector<MeasuredStep> measured;
  for (size_t i = 0; i + 1 < steps.size(); i += 2) {
    const auto settings = json::parse(steps[i]);
    measured.push_back({predict(planned_gpt(settings), machine, settings_of(settings)), std::stod(steps[i + 1])});
  }
  std::cout << json::parse(fit_machine(machine, measured).to_json()).dump() << std::endl;
}

void answer(const json& settings) {
  using Clock = std::chrono::steady_clock;
  internal::PlannedTraining training(planned_gpt(settings), settings_of(settings), torch::kCPU);
  serve({{"step", [&] {
            const auto begin = Clock::now();
            training.step();
            return json{{"step", std::chrono::duration<double>(Clock::now() - begin).count()}};
          }}});
}

int run(int argc, char** argv) {
  at::set_num_threads(1);
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "predict" && argc > 3) {
    for (int i = 3; i < argc; ++i) print_prediction(argv[2], json::parse(argv[i]));
    return 0;
  }
  if (what == "fit" && argc > 4) {
    print_fitted(argv[2], {argv + 3, argv + argc});
    return 0;
  }
  TORCH_CHECK(
      (what == "machine" && argc == 2) || (what == "run" && argc == 3),
      "usage: measure_planned_step machine | fit MACHINE SETTINGS SECONDS... | predict MACHINE SETTINGS... | run SETTINGS");
  init_process_group();
  what == "machine" ? print_machine() : answer(json::parse(argv[2]));
  destroy_process_group();
  return 0;
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("measure_planned_step", [&] { return tessera::benchmarks::run(argc, argv); });
}
