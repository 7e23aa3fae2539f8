#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::testing::sim {

/// What things are taken to cost, in microseconds. The device computes with these times beside what it really does, and says when
/// everything would start and end: a test of overlap neither waits nor measures. The ranks are taken to reach a collective
/// together.
struct TimeModel {
  double launch_us = 0; ///< of the host, a launch
  /// Of an operator's work, by its name ("aten::addmm"). Costs nothing where there is no function.
  std::function<double(const std::string& name)> work_us;
  double collective_us = 0; ///< α: the latency of a collective
  double us_per_byte = 0;   ///< β: its time a byte of its full buffer
};

/// One launch.
struct Interval {
  std::string name;
  std::string stream;
  double begin_us = 0, end_us = 0;                   ///< modelled
  double measured_begin_us = 0, measured_end_us = 0; ///< as it ran here, delays included
};

/// What ran when on which stream, while it is recorded.
class TimeLine {
 public:
  void start();
  /// Ends the recording. All streams must be idle.
  std::vector<Interval> stop();

  void set_model(TimeModel model);
  double launch_us();
  double work_us(const std::string& name);
  double collective_us(int64_t bytes);

  /// Where it is recorded: work that also notes when it ran.
  std::function<void()> recorded(Interval interval, std::function<void()> work);

 private:
  std::mutex mutex_;
  TimeModel model_;
  bool is_recording_ = false;
  std::deque<Interval> intervals_; // does not move what it holds
};

enum class TimeAxis { kModelled, kMeasured };

/// Writes the intervals as a Chrome trace (chrome://tracing, Perfetto) with a row for each stream.
void write_chrome_trace(const std::string& path, const std::vector<Interval>& intervals, TimeAxis axis);

} // namespace tessera::testing::sim
