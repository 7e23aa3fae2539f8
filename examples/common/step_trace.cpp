#include "common/step_trace.h"

#include <fmt/format.h>
#include <tessera/collectives/process_context.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "common/files.h"
#include "common/ranks.h"

namespace examples {
namespace {

using nlohmann::json;
namespace profiler = torch::autograd::profiler;

constexpr int kFirstRow = 1'000'000; // past the numbers of threads

json read_json(const std::filesystem::path& file) { return json::parse(read_file(file.string(), "the trace")); }

/// The calls that the flight recorder has of the time since `begin_ns`, a row for each group, in microseconds after `base_ns`.
class CollectiveRows {
 public:
  CollectiveRows(const json& record, int64_t begin_ns, int64_t base_ns) : base_ns_(base_ns) {
    for (const auto& call : record["calls"]) {
      const bool is_whole = call["ended_ns"].is_number() && call["issued_ns"].get<int64_t>() >= begin_ns;
      if (is_whole && call["what"] != "connect") add(call, record["groups"][call["group"].get<size_t>()]);
    }
  }
  const json& events() const { return events_; }

 private:
  void add(const json& call, const json& group) {
    const auto name = fmt::format("{} {}", group["name"].get<std::string>(), group["ranks"].dump());
    const auto [row, is_new] = rows_.emplace(name, kFirstRow + static_cast<int>(rows_.size()));
    if (is_new) {
      events_.push_back(
          {{"ph", "M"}, {"name", "thread_name"}, {"pid", getpid()}, {"tid", row->second}, {"args", {{"name", name}}}});
      events_.push_back({{"ph", "M"},
                         {"name", "thread_sort_index"},
                         {"pid", getpid()},
                         {"tid", row->second},
                         {"args", {{"sort_index", row->second}}}});
    }
    // Those of a group run one after another.
    const auto end = call["ended_ns"].get<int64_t>(), begin = std::max(call["issued_ns"].get<int64_t>(), last_[name]);
    last_[name] = std::max(last_[name], end);
    events_.push_back({{"ph", "X"},
                       {"cat", "collective"},
                       {"name", fmt::format("{} {}", call["what"].get<std::string>(), call.value("label", ""))},
                       {"pid", getpid()},
                       {"tid", row->second},
                       {"ts", static_cast<double>(begin - base_ns_) / 1e3},
                       {"dur", static_cast<double>(std::max<int64_t>(end - begin, 0)) / 1e3},
                       {"args", {{"bytes", call.value("bytes", int64_t{0})}}}});
  }

  int64_t base_ns_;
  json events_ = json::array();
  std::map<std::string, int> rows_;
  std::map<std::string, int64_t> last_;
};

} // namespace

StepTrace::StepTrace()
    : begin_ns_(
          std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count()) {
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<torch::profiler::impl::ActivityType> activities{torch::profiler::impl::ActivityType::CPU};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities, {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE});
}

StepTrace::~StepTrace() {
  if (!is_recording_) return;
  try {
    profiler::disableProfiler();
  } catch (const std::exception&) { // of a step that has failed already
  }
}

void StepTrace::write(const std::string& folder) {
  is_recording_ = false;
  const auto result = profiler::disableProfiler();
  const auto file = std::filesystem::path(folder) / fmt::format("rank-{}.json", rank());
  open_for_writing(file.string()).close(); // or the cause is told
  tessera::write_trace(folder);
  const auto record = read_json(file);
  result->save(file.string());
  auto trace = read_json(file);
  const CollectiveRows rows(record, begin_ns_, trace.value("baseTimeNanoseconds", int64_t{0}));
  for (const auto& event : rows.events()) trace["traceEvents"].push_back(event);
  auto stream = open_for_writing(file.string());
  stream << trace.dump() << std::flush;
  TORCH_CHECK(stream, "cannot write ", file.string());
}

} // namespace examples
