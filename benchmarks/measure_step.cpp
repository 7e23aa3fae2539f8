// One rank of a training step, driven by `benchmarks/compare` through standard input. Takes the flags of train_gpt.
#include <gpt/ranks.h>
#include <tessera/collectives/process_context.h>

#include <chrono>
#include <cstdio>

#include "serve.h"
#include "train_step.h"

namespace tessera::benchmarks {
namespace {

nlohmann::json to_json(const CollectiveCounts& counts) {
  nlohmann::json result = nlohmann::json::object();
  for (const auto& [kind, calls] : counts) result[to_string(kind)] = calls;
  return result;
}

void answer(const gpt::Options& options) {
  TrainStep step(options);
  serve({{"step",
          [&]() -> nlohmann::json {
            const auto begin = std::chrono::steady_clock::now();
            step.run();
            return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
          }},
         {"count",
          [&]() -> nlohmann::json {
            const auto counts = step.count();
            return {{"forward", to_json(counts.forward)},
                    {"backward", to_json(counts.backward)},
                    {"clip", to_json(counts.clip)},
                    {"optimizer", to_json(counts.optimizer)}};
          }},
         {"memory", [&]() -> nlohmann::json {
            return {{"state_bytes", step.state_bytes()}, {"parameters", step.parameter_count()}};
          }}});
}

void run(const gpt::Options& options) {
  gpt::join_job(options.threads);
  answer(options);
  destroy_process_group();
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  try {
    tessera::benchmarks::run(gpt::parse_options(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "measure_step: %s\n", error.what());
    return 1;
  }
}
