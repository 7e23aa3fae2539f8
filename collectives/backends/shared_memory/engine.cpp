#include <tessera/collectives/backends/shared_memory/engine.h>

#include <tessera/base/background_scheduling.h>
#include <tessera/base/error_text.h>
#include <tessera/collectives/backends/shared_memory/driving.h>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <numeric>

namespace tessera::internal::shared_memory {

namespace {

constexpr std::chrono::milliseconds kLookInterval(100); // for ranks that have ended, while somebody waits

void pause() {
  constexpr int kPauses = 32;
#if defined(__x86_64__)
  for (int i = 0; i < kPauses; ++i) __builtin_ia32_pause();
#endif
}

} // namespace

Engine::Engine(GroupMemory memory, EngineOptions options) : options_(std::move(options)), memory_(std::move(memory)) {
  const BackgroundScheduling of_the_thread;
  background_ = std::thread(&Engine::background_loop, this);
}

Engine::~Engine() { close(); }

std::shared_ptr<Engine> Engine::make(GroupMemory memory, EngineOptions options) {
  return {new Engine(std::move(memory), std::move(options)), [](Engine* engine) {
            if (engine->is_forked_copy())
              leave_to_parent(engine); // its thread is not here
            else
              delete engine;
          }};
}

void Engine::check_not_forked(const std::string& call) const {
  TORCH_CHECK(!is_forked_copy(), call,
              ": this process was forked from a rank and has no part in its groups: it may join a job of its own, and must not "
              "use what the rank sharded");
}

void Engine::check_usable(const std::string& call) const {
  TORCH_CHECK(!closed_, call, ": the process group was destroyed");
  TORCH_CHECK(failure_.empty(), call, ": the group cannot be used after an earlier failure: ", failure_);
}

Engine::Line& Engine::line_of(LaneKey key) {
  if (const auto found = lines_.find(key); found != lines_.end()) return *found->second;
  std::vector<int> places{key.from, key.to};
  if (key == LaneKey()) {
    places.resize(options_.ranks.size());
    std::iota(places.begin(), places.end(), 0);
  }
  Members members;
  members.places = places;
  members.has_left = [this, places](int member) { return memory_.has_left(places[member]); };
  for (const int place : places) {
    members.ranks.push_back(options_.ranks[place]);
    if (!options_.arenas.empty()) members.arenas.push_back(options_.arenas[place]);
  }
  const auto lane = key == LaneKey() ? memory_.lane_of_all(options_.rank) : memory_.lane_of_pair(key.from, key.to, options_.rank);
  auto line = std::make_unique<Line>(Line{lane, std::move(members), key == LaneKey()});
  return *lines_.emplace(key, std::move(line)).first->second;
}

std::shared_ptr<Operation> Engine::start(LaneKey key, Request&& request) {
  auto operation = std::make_shared<Operation>(std::move(request), options_.group);
  if (is_forked_copy()) check_not_forked(operation->text()); // whose mutex may be locked for ever
  std::lock_guard lock(mutex_);
  if (closed_ || !failure_.empty()) check_usable(operation->text());
  auto& line = line_of(key);
  line.queue.push_back(operation);
  publish(line);
  operation->is_shown = operation->is_published() && operation->is_short(line.lane);
  if (!operation->is_shown) note_duty(*operation, options_.background_delay);
  return operation;
}

// Called with `mutex_` held.
void Engine::publish(Line& line) {
  while (line.published < line.queue.size() && line.queue[line.published]->publish(line.lane, line.next_call)) {
    ++line.published;
    ++line.next_call;
  }
}

Engine::OperationPtr Engine::front_of(Line& line) {
  std::lock_guard lock(mutex_);
  if (line.published < line.queue.size()) publish(line);
  return line.published > 0 ? line.queue.front() : nullptr;
}

std::vector<Engine::Line*> Engine::lines() {
  std::lock_guard lock(mutex_);
  std::vector<Line*> all;
  for (const auto& [key, line] : lines_)
    if (!line->queue.empty()) all.push_back(line.get());
  return all;
}

/// Moves on all lanes, as far as they go without waiting, unless another thread does. Returns whether a call has ended.
bool Engine::try_to_advance() {
  const Driving driving(driving_, Driving::kTry);
  if (!driving) return false;
  bool any = false;
  for (auto* line : lines()) any = advance(*line) || any;
  return any;
}

bool Engine::advance(Line& line) {
  bool any = false;
  while (const auto operation = front_of(line)) {
    try {
      if (!operation->advance(line.lane, line.members)) break;
      finish_front(line, operation);
    } catch (const std::exception& error) {
      fail_front(line, std::current_exception(), error_text(error));
    }
    any = true;
  }
  return any;
}

void Engine::finish_front(Line& line, const OperationPtr& operation) {
  {
    std::lock_guard lock(mutex_);
    line.queue.pop_front();
    --line.published;
    if (operation->needs_background) --background_work_;
  }
  operation->complete();
  wake_threads_here();
  withdraw_announcement(*operation);
}

// Where others were told that this rank waits, whether a thread still does or it is polled.
void Engine::withdraw_announcement(Operation& operation) const {
  if (operation.announced.exchange(Operation::kNoRank) != Operation::kNoRank) options_.watch->withdraw();
}

void Engine::wake_threads_here() {
  if (asleep_ > 0) memory_.bell().ring();
}

void Engine::wait(Operation& operation) {
  if (!operation.is_done()) {
    reporting_waiters_.fetch_add(1);
    const auto end = c10::make_scope_exit([&] { reporting_waiters_.fetch_sub(1); });
    complete(operation);
  }
  if (operation.failure) explain_and_throw(operation);
}

void Engine::complete(Operation& operation) {
  if (!operation.is_done()) {
    waiting_.fetch_add(1);
    const auto end = c10::make_scope_exit([&] { end_waiting(); });
    {
      std::lock_guard lock(mutex_);
      start_time_limit(operation);
    }
    await(operation);
  }
  if (!operation.failure) withdraw_announcement(operation);
}

// Called with `mutex_` held. Whether the operation is in a queue.
bool Engine::start_time_limit(const Operation& operation) {
  const auto deadline = Clock::now() + options_.timeout;
  for (const auto& [key, line] : lines_) {
    const auto found =
        std::find_if(line->queue.begin(), line->queue.end(), [&](const auto& each) { return each.get() == &operation; });
    if (found == line->queue.end()) continue;
    for (auto it = line->queue.begin(); it != found + 1; ++it) // those before it have to come to their end as well
      if (!(*it)->deadline) (*it)->deadline = deadline;
    return true;
  }
  return false;
}

void Engine::end_waiting() {
  waiting_.fetch_sub(1);
  wake_threads_here(); // one of them drives now
  std::lock_guard lock(mutex_);
  if (background_work_ == 0) return;
  background_begins_ = Clock::now() + options_.background_delay;
  wake_background_.notify_one();
}

void Engine::await(const Operation& operation) {
  const auto begin = Clock::now();
  auto next_look = begin + kLookInterval;
  while (true) {
    try_to_advance();
    if (operation.is_done()) return;
    const auto now = Clock::now();
    if (now - begin < options_.spin) {
      options_.shares_cores ? std::this_thread::yield() : pause();
    } else {
      sleep(&operation);
    }
    if (now < next_look) continue;
    look_for_absences();
    next_look = Clock::now() + kLookInterval;
  }
}

// What comes between the last look and the sleep rings the bell: this thread is a listener by then.
void Engine::sleep(const Operation* operation) {
  auto& bell = memory_.bell();
  asleep_.fetch_add(1);
  const auto entered = bell.enter();
  const bool go_on = try_to_advance() || closed_ || (operation != nullptr && operation->is_done());
  if (!go_on) bell.sleep(entered, kLookInterval);
  bell.leave();
  asleep_.fetch_sub(1);
}

bool Engine::is_completed(Operation& operation) {
  if (operation.is_done() || is_forked_copy()) return operation.is_done();
  try_to_advance();
  if (operation.is_done()) return true;
  operation.is_shown ? look_for_polled(operation) : complete_in_background(operation);
  return operation.is_done();
}

/// The others need nothing more of this rank, so that no thread goes on with it before the next poll.
void Engine::look_for_polled(const Operation& operation) {
  {
    const std::lock_guard lock(mutex_);
    start_time_limit(operation);
    const auto now = Clock::now();
    if (now < next_polled_look_) return;
    next_polled_look_ = now + kLookInterval;
  }
  look_for_absences();
}

void Engine::complete_in_background(Operation& operation) {
  std::lock_guard lock(mutex_);
  // One that has left its queue and is not done yet is no background work any more: nobody would count it down.
  if (start_time_limit(operation) && !closed_) note_duty(operation, {});
}

void Engine::note_duty(Operation& operation, std::chrono::microseconds delay) {
  const auto due = Clock::now() + delay;
  if (!operation.needs_background) {
    operation.needs_background = true;
    if (background_work_++ == 0) background_begins_ = due;
  }
  background_begins_ = std::min(background_begins_, due);
  wake_background_.notify_one();
}

void Engine::background_loop() {
  std::unique_lock lock(mutex_);
  auto next_look = Clock::now();
  while (!closed_) {
    if (background_work_ == 0 || waiting_ > 0) { // those who wait do it
      wake_background_.wait(lock);
      continue;
    }
    if (Clock::now() < background_begins_) {
      wake_background_.wait_until(lock, background_begins_);
      continue;
    }
    lock.unlock();
    if (!try_to_advance()) sleep(nullptr);
    wake_threads_here();
    if (Clock::now() >= next_look) {
      look_for_absences();
      next_look = Clock::now() + kLookInterval;
    }
    lock.lock();
  }
}

void Engine::leave() {
  if (is_forked_copy()) return;
  if (options_.departures) options_.watch->announce_departure(options_.departures);
  close();
}

void Engine::close() {
  if (is_forked_copy()) return;
  {
    std::lock_guard lock(mutex_);
    if (closed_.exchange(true)) return;
  }
  {
    const Driving driving(driving_, Driving::kWait); // nobody copies from or to the tensors of what fails now
    memory_.leave(options_.rank);                    // before the tensors of what fails are let go of
    fail_all_queued("the process group was destroyed");
  }
  wake_background_.notify_all();
  memory_.bell().ring();
  background_.join();
}

} // namespace tessera::internal::shared_memory
