// The share of a pipeline's time in which its ranks wait, beside that of the simulated schedule. Layers compute by sleeping, so
// that ranks on one machine do not share its cores:
//
//   measure_pipeline --pipeline_ranks 4 --kind zb-h1 --count 8 --milliseconds 10 --svg measured.svg
#include <absl/flags/flag.h>
#include <common/command_line.h>
#include <common/program.h>
#include <common/ranks.h>
#include <fmt/format.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline.h>
#include <torch/torch.h>

#include <chrono>
#include <fstream>
#include <thread>

ABSL_FLAG(int32_t, pipeline_ranks, 4, "stages, a rank each");
ABSL_FLAG(std::string, kind, "1f1b", "schedule, of one stage a rank: gpipe, 1f1b or zb-h1");
ABSL_FLAG(int64_t, count, 8, "micro-batches");
ABSL_FLAG(double, milliseconds, 10, "that a forward of a stage takes, its input gradients, and its weight gradients, each");
ABSL_FLAG(int64_t, measured, 5, "steps that are measured");
ABSL_FLAG(std::string, svg, "", "write a picture of the shortest of them to this file");

namespace {

void sleep_for(double milliseconds) { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds)); }

/// A Linear each, whose gradients take as long as the forward.
struct SleepersImpl : torch::nn::Module {
  SleepersImpl(int64_t count, double milliseconds) : pause(milliseconds) {
    for (int64_t i = 0; i < count; ++i) {
      linears.emplace_back(register_module(c10::str("linear", i), torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false))));
      linears.back()->weight.register_hook([this](const torch::Tensor&) { sleep_for(pause); });
    }
  }
  torch::Tensor run(size_t i, torch::Tensor x) {
    sleep_for(pause);
    if (!x.requires_grad()) x = x.clone().requires_grad_();
    const auto y = linears[i](x);
    y.register_hook([this](const torch::Tensor&) { sleep_for(pause); });
    return y;
  }
  double pause;
  std::vector<torch::nn::Linear> linears;
};
TORCH_MODULE(Sleepers);

/// The shortest step.
tessera::PipelineSimulation measure(tessera::Pipeline& pipeline, const tessera::DeviceMesh& mesh, int64_t micro_batches) {
  const std::vector<tessera::PipelineValue> batches(static_cast<size_t>(micro_batches), torch::ones({2, 4}));
  tessera::PipelineSimulation shortest;
  for (int64_t i = 0; i <= absl::GetFlag(FLAGS_measured); ++i) {
    mesh.communicator()->barrier("step");
    const auto times = pipeline.measured_step(batches).times;
    if (i == 1 || (i > 1 && times.makespan < shortest.makespan)) shortest = times;
  }
  return shortest;
}

void run() {
  tessera::init_process_group();
  at::set_num_threads(1);
  const auto ranks = tessera::process_context().world_size();
  const double pause = absl::GetFlag(FLAGS_milliseconds);
  const auto micro_batches = absl::GetFlag(FLAGS_count);
  const auto kind = tessera::pipeline_schedule_kind(absl::GetFlag(FLAGS_kind));
  const auto mesh = tessera::init_device_mesh(torch::kCPU, {ranks}, {"pp"});
  Sleepers model(ranks, pause);
  tessera::PipelineLayers layers(*model);
  for (size_t i = 0; i < static_cast<size_t>(ranks); ++i) {
    layers.add(c10::str("layer", i), {c10::str("linear", i)},
               [impl = model.get(), i](const torch::Tensor& x) { return impl->run(i, x); });
  }
  const tessera::PipelineLoss loss{
      .sum = [](const tessera::PipelineValue& output, const tessera::PipelineValue&) { return output.toTensor().sum(); }};
  tessera::Pipeline pipeline(tessera::split(layers, mesh), kind, loss);
  const auto times = measure(pipeline, mesh, micro_batches);
  const double step = 1e3 * times.makespan;
  const auto simulated = tessera::simulate_pipeline(pipeline.schedule(micro_batches));
  if (tessera::process_context().rank() == 0) {
    const double work = 3 * pause * static_cast<double>(micro_batches);
    fmt::print("{}, p {}, m {}: a step {:.1f} ms, idle {:.3f}; simulated {:.1f} ms, idle {:.3f}\n", absl::GetFlag(FLAGS_kind),
               ranks, micro_batches, step, 1 - work / step, simulated.makespan * pause, simulated.idle_share());
    if (const auto path = absl::GetFlag(FLAGS_svg); !path.empty()) {
      std::ofstream file(path);
      file << tessera::to_svg(times);
      TORCH_CHECK(file.flush(), "cannot write ", path);
    }
  }
  tessera::destroy_process_group();
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("measure_pipeline", [&] {
    examples::parse_command_line(argc, argv, "measures how long the ranks of a pipeline wait", "measure_pipeline.cpp");
    return examples::run_ranks(absl::GetFlag(FLAGS_pipeline_ranks), run);
  });
}
