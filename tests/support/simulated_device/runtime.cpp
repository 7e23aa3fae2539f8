#include <tessera/tests/support/simulated_device/runtime.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace tessera::testing::sim {

namespace {

thread_local size_t own_current_stream = 0;

} // namespace

size_t current_stream() { return own_current_stream; }
size_t exchange_current_stream(size_t stream) { return std::exchange(own_current_stream, stream); }

Runtime& Runtime::get() {
  static auto* const runtime = new Runtime;
  return *runtime;
}

Runtime::Runtime() {
  make_stream(); // the default one
  name_stream(make_stream(), "the host");
}

void Runtime::set_delays(const Delays& delays) {
  synchronize_all("set_delays");
  const std::lock_guard lock(mutex_);
  delays_ = delays;
  for (auto& line : lines_) line.stream.set_delays(delays);
}

size_t Runtime::make_stream() {
  const std::lock_guard lock(mutex_);
  auto& made = lines_.emplace_back(lines_.size());
  made.name = c10::str("stream ", made.stream.id());
  made.stream.set_delays(delays_);
  return made.stream.id();
}

Runtime::Line& Runtime::line(size_t stream) {
  TORCH_CHECK(stream < lines_.size(), "the simulated device has no stream ", stream);
  return lines_[stream];
}

void Runtime::name_stream(size_t stream, const std::string& name) {
  const std::lock_guard lock(mutex_);
  line(stream).name = name;
}

std::string Runtime::name_of(size_t stream) {
  const std::lock_guard lock(mutex_);
  return line(stream).name;
}

Position Runtime::append(Line& line, std::function<void()> work, Stream::Start start) {
  auto caught = [this, work = std::move(work)] {
    try {
      work();
    } catch (const std::exception& error) {
      keep_error(error.what());
    }
  };
  const Position position{line.stream.id(), line.stream.push(std::move(caught), start)};
  line.known.join(position);
  return position;
}

void Runtime::launch(size_t stream, Launch launch) {
  const std::lock_guard lock(mutex_);
  auto& on = line(stream);
  counters_.add_launches(launch.name, on.name, launch.count);
  host_us_ += time_line_.launch_us();
  const double begin = std::max(host_us_, on.free_us);
  on.free_us = begin + launch.modelled_us;
  on.known.join(host_);
  const Position position{stream, on.stream.pushed() + 1};
  on.known.join(position);
  checker_.note({launch.name, on.name, position}, launch.uses, on.known);
  append(on, time_line_.recorded({launch.name, on.name, begin, on.free_us}, std::move(launch.work)), launch.start);
}

void Runtime::note_host(const std::string& name, const std::vector<Use>& uses) {
  const std::lock_guard lock(mutex_);
  const Position position{kHost, ++host_accesses_};
  host_.join(position);
  checker_.note({name, lines_[kHost].name, position}, uses, host_);
}

void Runtime::push(size_t stream, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  append(line(stream), std::move(work));
}

Mark Runtime::record(size_t stream) {
  const std::lock_guard lock(mutex_);
  const auto& on = line(stream);
  return {{stream, on.stream.pushed()}, on.known, on.free_us};
}

void Runtime::make_wait(size_t stream, const Mark& mark) {
  const std::lock_guard lock(mutex_);
  auto& waiting = line(stream);
  waiting.known.join(mark.known);
  append_wait(waiting, mark);
}

void Runtime::make_follow(size_t stream, const Mark& mark) {
  const std::lock_guard lock(mutex_);
  append_wait(line(stream), mark);
}

void Runtime::append_wait(Line& waiting, const Mark& mark) {
  waiting.free_us = std::max(waiting.free_us, mark.modelled_us);
  if (mark.position.stream == waiting.stream.id()) return;
  append(waiting, [&awaited = line(mark.position.stream).stream, count = mark.position.count] { awaited.wait_for(count); });
}

bool Runtime::has_passed(const Mark& mark) {
  const std::lock_guard lock(mutex_);
  return line(mark.position.stream).stream.has_done(mark.position.count);
}

bool Runtime::query(const Mark& mark) {
  const std::lock_guard lock(mutex_);
  if (!line(mark.position.stream).stream.query(mark.position.count)) return false;
  host_.join(mark.known);
  return true;
}

void Runtime::wait_for(const Mark& mark) {
  Stream* awaited = nullptr;
  {
    const std::lock_guard lock(mutex_);
    awaited = &line(mark.position.stream).stream;
  }
  awaited->wait_for(mark.position.count);
  const std::lock_guard lock(mutex_);
  host_.join(mark.known);
  host_us_ = std::max(host_us_, mark.modelled_us);
}

void Runtime::synchronize(const Mark& mark, const std::string& cause) {
  counters_.add_synchronization(cause);
  wait_for(mark);
  throw_kept_error();
}

void Runtime::synchronize_all(const std::string& cause) {
  counters_.add_synchronization(cause);
  std::vector<Mark> marks;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& line : lines_) marks.push_back({{line.stream.id(), line.stream.pushed()}, line.known, line.free_us});
  }
  for (const auto& mark : marks) wait_for(mark);
  throw_kept_error();
}

double Runtime::modelled_us() {
  const std::lock_guard lock(mutex_);
  double latest = host_us_;
  for (const auto& line : lines_) latest = std::max(latest, line.free_us);
  return latest;
}

void Runtime::keep_error(const std::string& text) {
  const std::lock_guard lock(error_mutex_);
  if (error_.empty()) error_ = text; // the first one is the cause of those that follow
}

void Runtime::throw_kept_error() {
  const std::lock_guard lock(error_mutex_);
  if (error_.empty()) return;
  TORCH_CHECK(false, "an error of the simulated device, found at a later call: ", std::exchange(error_, ""));
}

} // namespace tessera::testing::sim
