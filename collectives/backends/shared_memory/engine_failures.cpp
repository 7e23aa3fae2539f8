// How calls of an engine fail: ranks that do not come, and what follows from that for the other calls.
#include <tessera/collectives/backends/shared_memory/driving.h>
#include <tessera/collectives/backends/shared_memory/engine.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace tessera::internal::shared_memory {

void Engine::look_for_absences() {
  const Driving driving(driving_, Driving::kTry);
  if (!driving) return;
  for (auto* line : lines()) look_for_absences(*line);
}

// A rank may be gone and yet have done all that this call needs of it.
void Engine::look_for_absences(Line& line) {
  OperationPtr front;
  std::optional<Clock::time_point> deadline;
  {
    std::lock_guard lock(mutex_);
    if (line.queue.empty()) return;
    front = line.queue.front();
    deadline = front->deadline;
  }
  const auto absent = [&] {
    std::lock_guard lock(mutex_);
    return front->absent(line.lane);
  };
  std::vector<int> gone;
  for (const int member : absent())
    if (memory_.has_left(line.members.places[member]) || options_.watch->has_ended(line.members.ranks[member]))
      gone.push_back(member);
  const auto still_absent = absent(); // looked at after they were seen to be gone
  std::erase_if(gone,
                [&](int member) { return std::find(still_absent.begin(), still_absent.end(), member) == still_absent.end(); });
  const bool is_late = gone.empty() && deadline;
  std::vector<int64_t> ranks;
  for (const int member : is_late ? still_absent : gone) ranks.push_back(line.members.ranks[member]);
  if (ranks.empty()) return;
  if (is_late && Clock::now() < *deadline) return announce_long_wait(*front, *deadline, ranks);
  fail_front(line, {ranks, is_late, front->awaited(ranks, line.is_of_all)});
}

void Engine::announce_long_wait(Operation& operation, Clock::time_point deadline, const std::vector<int64_t>& ranks) {
  const bool is_known = std::find(ranks.begin(), ranks.end(), operation.announced) != ranks.end();
  if (is_known || Clock::now() < RankWatch::announces_wait_at(deadline, options_.timeout)) return;
  operation.announced = ranks.front();
  operation.announced = options_.watch->announce_wait(ranks);
  if (operation.is_done()) options_.watch->withdraw(); // whoever waited for it may have done so too soon
}

std::vector<int64_t> Engine::ended_ranks() const {
  std::vector<int64_t> ended;
  for (size_t rank = 0; rank < options_.ranks.size(); ++rank)
    if (static_cast<int>(rank) != options_.rank && options_.watch->has_ended(options_.ranks[rank]))
      ended.push_back(options_.ranks[rank]);
  return ended;
}

// A rank is missed only where somebody waits for it.
std::string Engine::explain(const Operation& operation, const Absence& absence, bool is_awaited) const {
  if (absence.timed_out) {
    const auto cause = is_awaited ? options_.watch->note_timeout(absence.ranks) : "";
    return c10::str(operation.text(), ": timed out after ", options_.timeout.count(), " ms, waiting for ", absence.awaited,
                    cause);
  }
  const auto names =
      is_awaited ? options_.watch->blame(absence.ranks, ended_ranks(), options_.departures) : describe_ended(absence.ranks);
  return c10::str(operation.text(), ": lost the connection to ", names);
}

namespace {

std::exception_ptr connection_error(const std::string& text) {
  return std::make_exception_ptr(c10::DistNetworkError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text));
}

} // namespace

void Engine::fail_front(Line& line, const Absence& absence) {
  const bool is_awaited = reporting_waiters_ > 0;
  OperationPtr front;
  {
    std::lock_guard lock(mutex_);
    front = line.queue.front();
  }
  if (!is_awaited && !absence.timed_out) options_.watch->announce_ended(absence.ranks); // before this rank leaves because of it
  const auto text = explain(*front, absence, is_awaited);                               // asks the store, which takes its time
  fail_front(line, connection_error(text), text, is_awaited ? std::nullopt : std::optional(absence));
}

void Engine::fail_front(Line& line, std::exception_ptr failure, const std::string& text, std::optional<Absence> unexplained) {
  memory_.leave(options_.rank); // before the tensors of what fails are let go of: others may be reading them
  {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = text;
    const auto front = line.queue.front();
    line.queue.pop_front();
    if (line.published > 0) --line.published;
    if (front->needs_background) --background_work_;
    front->fail(std::move(failure), std::move(unexplained));
  }
  fail_all_queued(c10::str("the group's connections were closed after an earlier failure: ", text));
  wake_threads_here();
}

void Engine::fail(const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = text;
  }
  {
    const Driving driving(driving_, Driving::kWait); // nobody copies from or to the tensors of what fails now
    memory_.leave(options_.rank);
    fail_all_queued(c10::str("the group's connections were closed after an earlier failure: ", text));
  }
  wake_threads_here();
}

// Whoever copies for them has come to an end: called by the thread that drives.
void Engine::fail_all_queued(const std::string& why) {
  std::lock_guard lock(mutex_);
  for (auto& [key, line] : lines_) {
    for (const auto& operation : line->queue) operation->fail(connection_error(c10::str(operation->text(), ": ", why)));
    line->queue.clear();
    line->published = 0;
  }
  background_work_ = 0;
}

void Engine::explain_and_throw(Operation& operation) {
  std::lock_guard lock(explaining_);
  if (const auto absence = std::exchange(operation.unexplained, std::nullopt))
    operation.failure = connection_error(explain(operation, *absence, true));
  std::rethrow_exception(operation.failure);
}

} // namespace tessera::internal::shared_memory
