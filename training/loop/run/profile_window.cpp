#include <tessera/training/loop/run/profile_window.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include <tessera/collectives/process_context.h>

namespace tessera::internal {

namespace {

using nlohmann::json;
namespace profiler = torch::autograd::profiler;

constexpr int kFirstRow = 1'000'000; // past the numbers of threads

json read_trace(const std::filesystem::path& file) {
  std::ifstream stream(file);
  TORCH_CHECK(stream, "Trainer: cannot read the trace ", file.string(), ": ", std::strerror(errno));
  return json::parse(stream);
}

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
  void add_row(const char* what, int row, const json& argument) {
    events_.push_back({{"ph", "M"}, {"name", what}, {"pid", getpid()}, {"tid", row}, {"args", argument}});
  }

  void add(const json& call, const json& group) {
    const auto name = fmt::format("{} {}", group["name"].get<std::string>(), group["ranks"].dump());
    const auto [row, is_new] = rows_.emplace(name, kFirstRow + static_cast<int>(rows_.size()));
    if (is_new) {
      add_row("thread_name", row->second, {{"name", name}});
      add_row("thread_sort_index", row->second, {{"sort_index", row->second}});
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

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

} // namespace

class ProfileWindow::Recording {
 public:
  Recording() : begin_ns_(now_ns()) {
    const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
    const std::set<torch::profiler::impl::ActivityType> activities{torch::profiler::impl::ActivityType::CPU};
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities, {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE});
  }
  ~Recording() {
    if (!is_recording_) return;
    try {
      profiler::disableProfiler();
    } catch (const std::exception&) { // of a step that has failed already
    }
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void write(const std::filesystem::path& folder) {
    is_recording_ = false;
    const auto result = profiler::disableProfiler();
    const auto file = folder / fmt::format("rank-{}.json", process_context().rank());
    tessera::write_trace(folder.string()); // makes the folder, and tells the cause where it cannot
    const auto record = read_trace(file);
    result->save(file.string());
    auto trace = read_trace(file);
    const CollectiveRows rows(record, begin_ns_, trace.value("baseTimeNanoseconds", int64_t{0}));
    for (const auto& event : rows.events()) trace["traceEvents"].push_back(event);
    std::ofstream stream(file);
    stream << trace.dump() << std::flush;
    TORCH_CHECK(stream, "Trainer: cannot write the trace ", file.string(), ": ", std::strerror(errno));
  }

 private:
  int64_t begin_ns_;
  bool is_recording_ = true;
};

ProfileWindow::ProfileWindow(const ProfileOptions& options) : options_(options) {}
ProfileWindow::~ProfileWindow() = default;

void ProfileWindow::begin_step(int64_t step) {
  const bool begins = !options_.folder.empty() && step >= options_.first_step && step < options_.first_step + options_.steps;
  if (begins && !recording_) recording_ = std::make_unique<Recording>();
}

void ProfileWindow::end_step(int64_t steps_done) {
  if (recording_ && steps_done >= options_.first_step + options_.steps) finish();
}

void ProfileWindow::finish() {
  if (!recording_) return;
  const auto recording = std::move(recording_);
  recording->write(options_.folder);
}

} // namespace tessera::internal
