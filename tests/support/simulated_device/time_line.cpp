#include <tessera/tests/support/simulated_device/time_line.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <fstream>
#include <set>
#include <utility>

namespace tessera::testing::sim {

namespace {

double now_us() { return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

} // namespace

void TimeLine::start() {
  const std::lock_guard lock(mutex_);
  intervals_.clear();
  is_recording_ = true;
}

std::vector<Interval> TimeLine::stop() {
  const std::lock_guard lock(mutex_);
  is_recording_ = false;
  return {intervals_.begin(), intervals_.end()};
}

void TimeLine::set_model(TimeModel model) {
  const std::lock_guard lock(mutex_);
  model_ = std::move(model);
}

double TimeLine::launch_us() {
  const std::lock_guard lock(mutex_);
  return model_.launch_us;
}

double TimeLine::work_us(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return model_.work_us ? model_.work_us(name) : 0;
}

double TimeLine::collective_us(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  return model_.collective_us + model_.us_per_byte * static_cast<double>(bytes);
}

std::function<void()> TimeLine::recorded(Interval interval, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (!is_recording_) return work;
  auto* const kept = &intervals_.emplace_back(std::move(interval));
  return [kept, work = std::move(work)] {
    kept->measured_begin_us = now_us();
    work();
    kept->measured_end_us = now_us();
  };
}

void write_chrome_trace(const std::string& path, const std::vector<Interval>& intervals, TimeAxis axis) {
  std::set<std::string> streams;
  for (const auto& interval : intervals) streams.insert(interval.stream);
  auto events = nlohmann::json::array();
  for (const auto& stream : streams) {
    const auto row = std::distance(streams.begin(), streams.find(stream));
    events.push_back({{"ph", "M"}, {"name", "thread_name"}, {"pid", 0}, {"tid", row}, {"args", {{"name", stream}}}});
  }
  for (const auto& interval : intervals) {
    const auto row = std::distance(streams.begin(), streams.find(interval.stream));
    const bool is_modelled = axis == TimeAxis::kModelled;
    const auto begin = is_modelled ? interval.begin_us : interval.measured_begin_us;
    const auto end = is_modelled ? interval.end_us : interval.measured_end_us;
    events.push_back({{"ph", "X"}, {"name", interval.name}, {"pid", 0}, {"tid", row}, {"ts", begin}, {"dur", end - begin}});
  }
  std::ofstream file(path);
  file << nlohmann::json{{"traceEvents", std::move(events)}}.dump() << '\n';
  TORCH_CHECK(file.good(), "the time line cannot be written to ", path);
}

} // namespace tessera::testing::sim
