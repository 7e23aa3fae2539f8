#include "figures.h"

#include <c10/util/Exception.h>
#include <tessera/collectives/process_context.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string_view>

#include "../median.h"
#include "ranks.h"

namespace tessera::benchmarks {
namespace {

using nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begin) { return 1e3 * std::chrono::duration<double>(Clock::now() - begin).count(); }

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

void check_counted(const std::string& what, const Traffic& mine, const Traffic& counted) {
  TORCH_CHECK(counted.calls == mine.calls && counted.bytes == mine.bytes, "the report of rank ", rank(), " is wrong: it has ",
              mine.calls, " ", what, " of ", mine.bytes, " bytes, but the communicators counted ", counted.calls, " of ",
              counted.bytes);
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

/// One of the runs that are timed.
void time_run(const Settings& settings, Trial& trial, Figures& figures) {
  trial.prepare();
  trial.report();
  wait_for_all(); // or the first to be ready would be timed while it waits for the others
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
  if (is_of_a_step(settings)) check_report(report, sent_by_groups);
  figures.add(sent);
  figures.exposed += 1e3 * report.exposed_seconds();
  if (is_of_a_step(settings)) figures.losses.push_back(trial.loss());
}

} // namespace

void Figures::add(const Counts& sent_in_run) {
  for (int kind = 0; kind < kCollectiveKinds; ++kind) {
    sent[kind].calls += sent_in_run[kind].calls;
    sent[kind].bytes += sent_in_run[kind].bytes;
  }
}

void Figures::take_slowest() {
  runs = max_over_ranks(runs);
  for (auto& [part, sum] : parts) sum = max_over_ranks(sum);
  exposed = max_over_ranks(exposed);
}

Figures measure(Trial& trial, const Settings& settings) {
  Figures figures;
  for (int64_t i = 0; i < settings.steps; ++i) time_run(settings, trial, figures); // as many on every rank
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

} // namespace tessera::benchmarks
