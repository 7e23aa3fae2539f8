#pragma once

#include <tessera/collectives/counters.h>
#include <tessera/fsdp/step_report.h>

#include <nlohmann/json.hpp>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "trial.h"

namespace tessera::benchmarks {

using Counts = std::array<CollectiveCounters::Count, kCollectiveKinds>;

/// What a rank measures.
struct Figures {
  std::vector<double> runs;            ///< milliseconds
  std::map<std::string, double> parts; ///< milliseconds of all runs
  Counts sent;                         ///< in all runs
  double exposed = 0;                  ///< milliseconds that this rank waited for groups, in all runs
  std::vector<double> losses;          ///< of this rank's rows, a run

  void add(const Counts& sent_in_run);
  /// The times of the slowest rank, of each run. Every rank calls it.
  void take_slowest();
};

/// Runs the case's steps, with one measure of each. Throws c10::Error where the report of the groups is another than what the
/// communicators counted.
Figures measure(Trial& trial, const Settings& settings);

/// Mean, percentiles, and what else is in a result of times.
nlohmann::ordered_json summary_of(std::vector<double> values);
/// By collective, in a run.
nlohmann::ordered_json json_of(const Counts& counts, double runs);

} // namespace tessera::benchmarks
