// A training step as one rank of simulated ones, driven by `benchmarks/compare` through standard input. Its compute is measured
// in this process, and its communication modelled.
//
// Usage: measure_simulated_step TOPOLOGY [FLAGS OF train_gpt]: the topology as a JSON text.
#include <common/program.h>
#include <tessera/collectives/process_context.h>

#include "serve.h"
#include "train_step.h"

namespace tessera::benchmarks {
namespace {

// Seconds of a step, and of its parts.
nlohmann::json predict_step(TrainStep& step) {
  simulated_clock().reset();
  step.run();
  const auto time = simulated_clock().elapsed();
  return {{"step", time.total}, {"compute", time.compute}, {"exposed", time.exposed}, {"communication", time.communication}};
}

int run(const std::string& topology, const gpt::Options& options) {
  at::set_num_threads(1);
  init_simulated_process_group(Topology::from_json(topology), /*rank=*/0);
  {
    TrainStep step(options);
    serve({{"step", [&] { return predict_step(step); }}});
  }
  destroy_process_group();
  return 0;
}

int run(int argc, char** argv) {
  TORCH_CHECK(argc > 1, "usage: measure_simulated_step TOPOLOGY [FLAGS OF train_gpt]");
  const std::string topology = argv[1];
  argv[1] = argv[0]; // what is left are the flags
  return run(topology, gpt::parse_options(argc - 1, argv + 1));
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("measure_simulated_step", [&] { return tessera::benchmarks::run(argc, argv); });
}
