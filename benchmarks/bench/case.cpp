#include "case.h"

#include <benchmark/benchmark.h>
#include <common/ranks.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/explain.h>
#include <tessera/fsdp/fully_shard.h>

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <string_view>
#include <utility>

#include "../median.h"
#include "memory_meter.h"
#include "trial.h"

namespace tessera::benchmarks {
namespace {

/// Tensors of a parameter's shape and dtype that an optimizer keeps, nearly.
int64_t optimizer_tensors(const std::string& optimizer) {
  if (optimizer == "adamw-8bit" || optimizer == "adafactor") return 0;
  if (optimizer == "sgd" || optimizer == "lion" || optimizer == "muon" || optimizer == "adamw-bf16") return 1;
  if (optimizer == "onebit-lamb" || optimizer == "zero-one-adam") return 4;
  return optimizer == "onebit-adam" ? 3 : 2;
}

using nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr int64_t kMegabyte = 1'000'000;
constexpr int kWarmUpRuns = 2;

double milliseconds_since(Clock::time_point begin) { return 1e3 * std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Prints nothing. Google Benchmark's own reporters print a table, and warn of how it was compiled itself.
class SilentReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& /*context*/) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const auto& run : runs) failed = failed || run.error_occurred;
  }
  bool failed = false;
};

using Counts = std::array<CollectiveCounters::Count, kCollectiveKinds>;

Counts counts_so_far() {
  Counts counts;
  for (int kind = 0; kind < kCollectiveKinds; ++kind) counts[kind] = process_context().count(static_cast<CollectiveKind>(kind));
  return counts;
}

Counts counts_since(const Counts& before) {
  auto counts = counts_so_far();
  for (int kind = 0; kind < kCollectiveKinds; ++kind) {
    counts[kind].calls -= before[kind].calls;
    counts[kind].bytes -= before[kind].bytes;
  }
  return counts;
}

/// What this rank measures.
struct Figures {
  std::vector<double> runs;            ///< milliseconds
  std::map<std::string, double> parts; ///< milliseconds of all runs
  Counts sent;                         ///< in all runs
  double exposed = 0;                  ///< milliseconds that this rank waited for groups, in all runs

  void add(const Counts& sent_in_run) {
    for (int kind = 0; kind < kCollectiveKinds; ++kind) {
      sent[kind].calls += sent_in_run[kind].calls;
      sent[kind].bytes += sent_in_run[kind].bytes;
    }
  }
  /// The times of the slowest rank, of each run.
  void take_slowest() {
    runs = examples::max_over_ranks(runs);
    for (auto& [part, sum] : parts) sum = examples::max_over_ranks({sum})[0];
    exposed = examples::max_over_ranks({exposed})[0];
  }
};

void check_counted(const std::string& what, const Traffic& mine, const Traffic& counted) {
  TORCH_CHECK(counted.calls == mine.calls && counted.bytes == mine.bytes, "the report of rank ", examples::rank(),
              " is wrong: it has ", mine.calls, " ", what, " of ", mine.bytes, " bytes, but the communicators counted ",
              counted.calls, " of ", counted.bytes);
}

/// A forward's and backward's gathers and reduce-scatters are those of its groups, by the counters and by the groups' own report.
/// Quantized reductions exchange and gather: their bytes count together.
void check_report(const StepReport& report, const Counts& sent) {
  const auto counted = [&](CollectiveKind kind) -> Traffic { return sent[static_cast<size_t>(kind)]; };
  const auto gathers = counted(CollectiveKind::kAllGather), scatters = counted(CollectiveKind::kReduceScatter),
             exchanges = counted(CollectiveKind::kAllToAll);
  if (exchanges.calls > 0) {
    const auto mine = report.all_gathers().bytes + report.reduce_scatters().bytes + report.all_reduces().bytes;
    return check_counted("gathers and reductions", {0, mine}, {0, gathers.bytes + scatters.bytes + exchanges.bytes});
  }
  check_counted("all_gather", report.all_gathers(), gathers);
  check_counted("reduce_scatter", report.reduce_scatters(), scatters);
}

/// Inside Google Benchmark's loop, which is told the time of each run.
void time_runs(benchmark::State& state, const Settings& settings, Trial& trial, Figures& figures) {
  for ([[maybe_unused]] auto _ : state) {
    trial.prepare();
    trial.report();
    examples::sum_over_ranks({0}); // or the first to be ready would be timed while it waits for the others
    const auto before = counts_so_far();
    const auto begin = Clock::now();
    auto last = begin;
    Counts sent_by_groups{};
    trial.run([&](const char* part) {
      const auto now = Clock::now();
      if (part == std::string_view("backward")) sent_by_groups = counts_since(before); // the optimizer may ask other ranks
      figures.parts[part] += 1e3 * std::chrono::duration<double>(now - last).count();
      last = now;
    });
    figures.runs.push_back(milliseconds_since(begin));
    const auto report = trial.report();
    const auto sent = counts_since(before);
    if (settings.measure == "step") check_report(report, sent_by_groups);
    figures.add(sent);
    figures.exposed += 1e3 * report.exposed_seconds();
    state.SetIterationTime(figures.runs.back() / 1e3);
  }
}

Figures measure(Trial& trial, const Settings& settings) {
  Figures figures;
  benchmark::RegisterBenchmark(settings.measure.c_str(),
                               [&](benchmark::State& state) { time_runs(state, settings, trial, figures); })
      ->Iterations(settings.steps) // the same on every rank
      ->UseManualTime();
  SilentReporter silent;
  benchmark::RunSpecifiedBenchmarks(&silent);
  benchmark::ClearRegisteredBenchmarks();
  TORCH_CHECK(!silent.failed && static_cast<int64_t>(figures.runs.size()) == settings.steps, "Google Benchmark ran ",
              figures.runs.size(), " of ", settings.steps, " runs");
  return figures;
}

ordered_json summary_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return values[static_cast<size_t>(std::lround(share * static_cast<double>(values.size() - 1)))];
  };
  double sum = 0;
  for (const double value : values) sum += value;
  return {{"mean", sum / static_cast<double>(values.size())},
          {"min", values.front()},
          {"p50", median(values)},
          {"p90", at(0.9)},
          {"p99", at(0.99)},
          {"max", values.back()}};
}

/// In a run.
ordered_json json_of(const Counts& counts, double runs) {
  auto sent = ordered_json::object();
  for (int kind = 0; kind < kCollectiveKinds; ++kind) {
    const auto& count = counts[kind];
    if (count.calls == 0) continue;
    sent[to_string(static_cast<CollectiveKind>(kind))] = {{"calls", static_cast<double>(count.calls) / runs},
                                                          {"bytes", static_cast<double>(count.bytes) / runs}};
  }
  return sent;
}

/// Peak bytes of the largest rank, with all that the case holds, in warm runs.
int64_t warm_up(Trial& trial, MemoryMeter& meter) {
  for (int i = 0; i < kWarmUpRuns; ++i) {
    if (i + 1 == kWarmUpRuns) meter.forget_peak();
    trial.prepare();
    trial.run();
  }
  return static_cast<int64_t>(examples::max_over_ranks({static_cast<double>(meter.peak())})[0]);
}

/// What is far beyond the limit fails as it does where a machine has no more. The stacks of threads are no part of it, but count
/// for the system.
void limit_memory(const Settings& settings) {
  if (settings.memory_limit_mb == 0) return;
  std::ifstream status("/proc/self/status");
  int64_t kilobytes = 0;
  for (std::string word; status >> word;) {
    if (word == "VmData:") status >> kilobytes;
  }
  constexpr int64_t kStacks = 512 * kMegabyte;
  const auto bytes = static_cast<rlim_t>(1024 * kilobytes + settings.memory_limit_mb * kMegabyte + kStacks);
  const rlimit limit{bytes, bytes};
  TORCH_CHECK(setrlimit(RLIMIT_DATA, &limit) == 0, "no memory limit on rank ", examples::rank());
}

void check_peak(const Settings& settings, int64_t peak) {
  const bool fits = settings.memory_limit_mb == 0 || peak <= settings.memory_limit_mb * kMegabyte;
  TORCH_CHECK(fits, "does not fit: a rank held ", peak, " bytes of the ", settings.memory_limit_mb, " MB that it may");
}

ordered_json describe(const Settings& settings, Trial& trial, const Figures& figures, int64_t peak) {
  const auto state = examples::max_over_ranks({static_cast<double>(trial.state_bytes())});
  const auto runs = static_cast<double>(settings.steps);
  const auto milliseconds = summary_of(figures.runs);
  ordered_json measured{{"runs", settings.steps}, {"milliseconds", milliseconds}};
  for (const auto& [part, sum] : figures.parts) measured["parts"][part] = sum / runs;
  const auto items = static_cast<double>(trial.items() * examples::world_size());
  if (settings.measure == "step") measured["items_per_second"] = 1e3 * items / milliseconds["mean"].get<double>();
  measured["exposed_milliseconds"] = figures.exposed / runs;
  measured["sent"] = json_of(figures.sent, runs);
  measured["parameters"] = trial.parameter_count();
  measured["state_bytes"] = static_cast<int64_t>(state[0]);
  measured["peak_bytes"] = peak;
  if (settings.measure == "step" && settings.precision == "fp32" && !settings.recompute) { // as the activations were measured
    const auto predicted = explain(trial.module(), {.optimizer_tensors = optimizer_tensors(settings.optimizer),
                                                    .activation_bytes = trial.activation_bytes()})
                               .memory.peak;
    measured["explained_peak_bytes"] = static_cast<int64_t>(examples::max_over_ranks({static_cast<double>(predicted)})[0]);
  }
  measured["verified"] = true; // or it threw
  return measured;
}

/// On one rank. The first writes the result.
void run_rank(const Settings& settings, const std::filesystem::path& folder, const std::filesystem::path& result) {
  examples::join_job(0);
  limit_memory(settings);
  auto meter = std::make_unique<MemoryMeter>();
  Trial trial(settings, folder, *meter);
  trial.verify();
  const auto peak = warm_up(trial, *meter);
  check_peak(settings, peak);
  meter.reset(); // it takes time
  auto figures = measure(trial, settings);
  figures.take_slowest();
  const auto measured = describe(settings, trial, figures, peak);
  if (examples::rank() == 0) std::ofstream(result) << measured.dump();
}

} // namespace

int run_case(const Settings& settings, const std::filesystem::path& folder, const std::filesystem::path& result) {
  return launch(settings.ranks, [&] {
    run_rank(settings, folder, result);
    destroy_process_group();
  });
}

} // namespace tessera::benchmarks
