#pragma once

#include <tessera/tests/support/simulated_device/checker.h>
#include <tessera/tests/support/simulated_device/clock.h>
#include <tessera/tests/support/simulated_device/counters.h>
#include <tessera/tests/support/simulated_device/stream.h>
#include <tessera/tests/support/simulated_device/time_line.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::testing::sim {

/// Work for a stream. It owns no tensor of the device, as a kernel owns none.
struct Launch {
  std::string name;
  std::vector<Use> uses;
  std::function<void()> work;
  double modelled_us = 0;
  int64_t count = 1; ///< of what a GPU would launch for it
  Stream::Start start = Stream::Start::kWhenAwaited;
};

/// A point of a stream, recorded: everything that was launched on it before, and what that comes after.
struct Mark {
  Position position;
  Clock known;
  double modelled_us = 0; ///< when it is reached
};

/// The device's streams, and the host's side of them: launches, events and synchronizations, in an order that vector clocks
/// follow.
///
/// All threads of the host count as one: what one thread has waited for, launches of every thread come after.
class Runtime {
 public:
  /// The only one. It outlives all that may still ask for it.
  static Runtime& get();

  /// Waits for all streams; then every stream's delays start anew.
  void set_delays(const Delays& delays);

  /// The number of a new stream.
  size_t make_stream();
  void name_stream(size_t stream, const std::string& name);
  std::string name_of(size_t stream);

  void launch(size_t stream, Launch launch);
  /// An operator of the host uses memory that copies of the device may use too.
  void note_host(const std::string& name, const std::vector<Use>& uses);
  /// Work of the device itself, which is no launch of a program: poison.
  void push(size_t stream, std::function<void()> work);

  Mark record(size_t stream);
  void make_wait(size_t stream, const Mark& mark);
  /// Orders what is launched next on the stream after the mark, as a device happens to, which no program may count on: for the
  /// checker they stay apart.
  void make_follow(size_t stream, const Mark& mark);
  /// Whether it is reached, which the host then knows.
  bool query(const Mark& mark);
  bool has_passed(const Mark& mark); ///< the same for the device's own use: the host learns nothing
  /// Blocks the host. `cause` is counted. An error that a launch ended with is thrown here, as CUDA throws it.
  void synchronize(const Mark& mark, const std::string& cause);
  void synchronize(size_t stream, const std::string& cause) { synchronize(record(stream), cause); }
  void synchronize_all(const std::string& cause);

  /// When all that was launched is done and the host has come that far, in modelled time.
  double modelled_us();

  Checker& checker() { return checker_; }
  CounterSet& counters() { return counters_; }
  TimeLine& time_line() { return time_line_; }

 private:
  struct Line {
    explicit Line(size_t id) : stream(id) {}
    Stream stream;
    Clock known;
    std::string name;
    double free_us = 0; // modelled
  };

  static constexpr size_t kHost = 1; ///< a line that nothing is launched on: its positions are the host's accesses

  Runtime();
  Line& line(size_t stream);
  Position append(Line& line, std::function<void()> work, Stream::Start start = Stream::Start::kWhenAwaited);
  void append_wait(Line& waiting, const Mark& mark);
  void wait_for(const Mark& mark);
  void keep_error(const std::string& text);
  void throw_kept_error();

  Checker checker_;
  CounterSet counters_;
  TimeLine time_line_;
  std::mutex mutex_; // the order of all launches; guards what follows
  std::deque<Line> lines_;
  Clock host_;
  uint64_t host_accesses_ = 0;
  double host_us_ = 0;
  Delays delays_;
  std::mutex error_mutex_;
  std::string error_;
};

/// The calling thread's current stream.
size_t current_stream();
/// Returns the one before.
size_t exchange_current_stream(size_t stream);

} // namespace tessera::testing::sim
