// A training step of the GPT of the examples under each strategy, on `--ranks n` local ranks (default 1):
//
//   tessera-bench --ranks 4 --benchmark_filter=full --layers 8 --width 512 --heads 8
//
// Google Benchmark's flags, and those of train_gpt for the model, the batch and the precision. Every rank runs the same number of
// steps (`--steps`, default 20); the first rank reports.
#include <benchmark/benchmark.h>
#include <common/program.h>
#include <common/ranks.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>

#include <algorithm>
#include <string>
#include <vector>

#include "train_step.h"

namespace tessera::benchmarks {
namespace {

constexpr int64_t kWarmUpSteps = 3;
constexpr int64_t kDefaultSteps = 20;

// What every rank but the first reports with.
class SilentReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

void measure(benchmark::State& state, const gpt::Options& options) {
  TrainStep step(options);
  for (int64_t i = 0; i < kWarmUpSteps; ++i) step.run();
  for ([[maybe_unused]] auto _ : state) step.run();
  const auto tokens = options.rows_a_rank(examples::world_size()) * examples::world_size() * options.model.sequence;
  state.counters["tokens/s"] = benchmark::Counter(static_cast<double>(tokens * state.iterations()), benchmark::Counter::kIsRate);
  state.counters["state_bytes/rank"] = static_cast<double>(step.state_bytes());
}

void add(gpt::Options options, const std::optional<Strategy>& strategy, BufferLayout layout) {
  options.strategy = strategy;
  options.layout = layout;
  options.mesh.clear();
  auto name = std::string(gpt::to_string(strategy));
  if (strategy) name += std::string("/") + gpt::to_string(layout);
  benchmark::RegisterBenchmark(name.c_str(), [options](benchmark::State& state) { measure(state, options); })
      ->Iterations(options.steps) // the same on every rank
      ->Unit(benchmark::kMillisecond)
      ->UseRealTime();
}

void add_all(const gpt::Options& options, int world) {
  if (world == 1) add(options, std::nullopt, BufferLayout::kRagged);
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    for (const auto& row : kStrategies) {
      if (!row.outer || (world > 1 && world % 2 == 0)) add(options, row.strategy, layout);
    }
  }
}

// Google Benchmark warns of a debug build where it was compiled itself with assertions, as Debian's package is.
void describe_builds() {
#ifdef NDEBUG
  benchmark::AddCustomContext("tessera", "a release build");
#else
  benchmark::AddCustomContext("tessera", "a build with assertions: its timings say little");
#endif
  benchmark::AddCustomContext("a warning of DEBUG below",
                              "is about Google Benchmark alone; Debian's package is optimized and keeps "
                              "assertions, outside of the loop that is timed");
}

void run(const gpt::Options& options) {
  examples::join_job(options.threads);
  add_all(options, examples::world_size());
  SilentReporter silent;
  examples::rank() == 0 ? benchmark::RunSpecifiedBenchmarks() : benchmark::RunSpecifiedBenchmarks(&silent);
  destroy_process_group();
}

int start(int argc, char** argv) {
  benchmark::Initialize(&argc, argv); // takes its own flags out
  describe_builds();
  const bool steps_given = std::any_of(argv + 1, argv + argc, [](std::string_view flag) { return flag.starts_with("--steps"); });
  auto options = gpt::parse_options(argc, argv);
  if (!steps_given) options.steps = kDefaultSteps;
  if (options.ranks > 0) return launch(options.ranks, [&] { run(options); });
  run(options);
  return 0;
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("tessera-bench", [&] { return tessera::benchmarks::start(argc, argv); });
}
