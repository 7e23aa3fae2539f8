// One rank of a training step, driven by `benchmarks/compare` through standard input. Takes the flags of train_gpt.
#include <common/program.h>
#include <common/ranks.h>
#include <tessera/collectives/counters.h>
#include <tessera/collectives/process_context.h>

#include <array>
#include <chrono>

#include "serve.h"
#include "train_step.h"

namespace tessera::benchmarks {
namespace {

// Seconds of each part of a step, and of all of it.
nlohmann::json time_step(TrainStep& step) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  auto last = begin;
  nlohmann::json seconds;
  step.run([&](const char* part) {
    const auto now = Clock::now();
    seconds[part] = std::chrono::duration<double>(now - last).count();
    last = now;
  });
  seconds["step"] = std::chrono::duration<double>(last - begin).count();
  return seconds;
}

using CollectiveCounts = std::array<int64_t, kCollectiveKinds>;

CollectiveCounts collectives_so_far() {
  CollectiveCounts counts;
  for (int kind = 0; kind < kCollectiveKinds; ++kind) {
    counts[kind] = process_context().count(static_cast<CollectiveKind>(kind)).calls;
  }
  return counts;
}

// Collectives that this rank started in each part of a step, by kind.
nlohmann::json count_collectives(TrainStep& step) {
  auto last = collectives_so_far();
  nlohmann::json counts;
  step.run([&](const char* part) {
    const auto now = collectives_so_far();
    for (int kind = 0; kind < kCollectiveKinds; ++kind) {
      counts[part][to_string(static_cast<CollectiveKind>(kind))] = now[kind] - last[kind];
    }
    last = now;
  });
  return counts;
}

void answer(const gpt::Options& options) {
  TrainStep step(options);
  serve({{"step", [&] { return time_step(step); }},
         {"count", [&] { return count_collectives(step); }},
         {"memory", [&] {
            return nlohmann::json{{"state_bytes", step.state_bytes()}, {"parameters", step.parameter_count()}};
          }}});
}

int run(const gpt::Options& options) {
  examples::join_job(options.threads);
  answer(options);
  destroy_process_group();
  return 0;
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("measure_step", [&] { return tessera::benchmarks::run(gpt::parse_options(argc, argv)); });
}
