#include <tessera/collectives/backends/gloo/channel.h>

#include <tessera/base/background_scheduling.h>
#include <tessera/base/error_text.h>
#include <tessera/base/time_limit.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <absl/algorithm/container.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <cstdlib>

namespace tessera::internal::gloo {

namespace {

constexpr int kSentinelTag = Channel::kPairTag; // a message between two ranks has further bits
constexpr auto kMonitorInterval = std::chrono::milliseconds(100);
// What an ended process has sent is on its way for a moment, and gloo's thread takes another to read it. The connections end
// behind that, unless somebody else holds them open. Counted in rounds of the monitor, each of which had to get the processor
// too: time also passes while the whole process is stopped. When the thread has read nothing for so many rounds, it does not come
// to read.
constexpr int kArrivalRounds = 6, kReadingRounds = 600;
// Asked ten times a second. A peer that has connected the group, and ended, may be seen to have ended before this side is done.
constexpr int kConnectingRounds = 5;
constexpr std::chrono::seconds kFailureLimit(8); // more than it takes to find out whom to name, where the store does not answer
constexpr int kDeviceDescriptors = 4;            // beside one for each peer: a pipe, an epoll descriptor, the listening socket
constexpr int64_t kLargeBuffer =
    1 << 20; // large and small buffers are cached apart: many small ones must not drive out a large one
constexpr size_t kCachedLargeBuffers = 4, kCachedSmallBuffers = 32;
constexpr size_t kRetiredLists = 24;

std::shared_ptr<::gloo::transport::Device> make_device(bool all_local) {
  using c10d::ProcessGroupGloo;
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"); interface && *interface) {
    try {
      return ProcessGroupGloo::createDeviceForInterface(interface);
    } catch (const std::exception& error) {
      TORCH_CHECK(false, "environment variable GLOO_SOCKET_IFNAME=", interface, ": ", error_text(error));
    }
  }
  return all_local ? ProcessGroupGloo::createDeviceForHostname("127.0.0.1") : ProcessGroupGloo::createDefaultDevice();
}

std::vector<at::Tensor> as_bytes(void* data, int64_t bytes) {
  return {at::from_blob(data, {bytes}, at::TensorOptions(at::kByte))};
}

// A wait that times out makes gloo close all connections of the group: one waiter is told of the time, the others of that.
bool has_timed_out(const std::string& cause) { return cause.find("Timed out waiting") != std::string::npos; }
bool was_closed_here(const std::string& cause) { return cause.find("Application timeout") != std::string::npos; }

int tag_of(int tag, int64_t length) {
  if (tag == Channel::kPairTag) return tag | static_cast<int>(length);
  return tag < 0 ? static_cast<int>(length) : tag;
}

template <typename Post>
void in_pieces(int64_t bytes, const Post& post) {
  for (int64_t offset = 0; offset < bytes; offset += Channel::kMaxMessageBytes)
    post(offset, std::min(bytes - offset, Channel::kMaxMessageBytes));
}

/// Returns when every rank has its connections: one that has nothing more to do may end at once, and closes its own.
void await_others(GroupStore& store, int size) {
  constexpr const char *kConnected = "connected", *kAllConnected = "all connected";
  if (store.add(kConnected, 1) == size) store.set(kAllConnected, std::vector<uint8_t>{1});
  store.wait({kAllConnected});
}

/// Connects the group within the timeout, and gives up early if a peer has ended. gloo alone would wait several timeouts for a
/// peer that accepts and says nothing.
c10::intrusive_ptr<c10d::ProcessGroupGloo> connect_group(const c10::intrusive_ptr<GroupStore>& store, int rank, int size,
                                                         c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> options) {
  using Group = c10::intrusive_ptr<c10d::ProcessGroupGloo>;
  constexpr std::chrono::milliseconds kGrace(500); // gloo's own timeout says more
  const auto timeout = options->timeout;
  const auto connect = [store, rank, size, options = std::move(options)] {
    return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
  };
  int rounds = 0;
  std::string reason;
  const auto gives_up = [&] {
    reason = store->reason_to_give_up();
    return !reason.empty() && ++rounds >= kConnectingRounds;
  };
  try {
    if (const auto group = within<Group>(timeout + kGrace, connect, gives_up)) return *group;
  } catch (const c10::DistError&) {
    throw;
  } catch (const c10::Error& error) { // c10d does not say that this is one of the network
    C10_THROW_ERROR(DistNetworkError, error.what_without_backtrace());
  }
  C10_THROW_ERROR(DistNetworkError, reason.empty() ? c10::str("timed out after ", timeout.count(), " ms") : reason);
}

} // namespace

Channel::Channel(const c10::intrusive_ptr<GroupStore>& store, int rank, int size, const ChannelOptions& options)
    : rank_(rank), size_(size), options_(options), lost_(size), seen_ended_(size) {
  TORCH_INTERNAL_ASSERT(options_.watch && static_cast<int>(options_.ranks.size()) == size);
  reserve_descriptors(size + kDeviceDescriptors);
  const OpenedDescriptors opened;
  const BackgroundScheduling of_the_threads; // gloo's, which inherit it by way of the one that makes them, and the monitor
  auto group_options = c10d::ProcessGroupGloo::Options::create(options.timeout);
  group_options->devices.push_back(make_device(options.all_local));
  group_options->threads = 1;
  group_ = connect_group(store, rank, size, group_options);
  sockets_ = opened.close_on_exec();
  sentinel_byte_ = at::empty({1}, at::TensorOptions(at::kByte));
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) receive(peer, kSentinelTag, sentinel_byte_.data_ptr(), 1, sentinels_);
  await_others(*store, size);
  monitor_ = std::thread(&Channel::monitor_loop, this);
}

Channel::~Channel() { close(); }

std::shared_ptr<Channel> Channel::connect(const c10::intrusive_ptr<GroupStore>& store, int rank, int size,
                                          const ChannelOptions& options) {
  std::shared_ptr<Channel> made(new Channel(store, rank, size, options), [](Channel* channel) {
    if (channel->is_forked_copy())
      leave_to_parent(channel); // gloo would wait for threads that are not here
    else
      delete channel;
  });
  if (!options.all_local) options.watch->add_witness(made);
  return made;
}

void Channel::send(int peer, int tag, const void* data, int64_t bytes, std::vector<Message>& messages) {
  auto tensors = as_bytes(const_cast<void*>(data), bytes);
  messages.push_back({group_->send(tensors, peer, tag), peer});
}

void Channel::receive(int peer, int tag, void* data, int64_t bytes, std::vector<Message>& messages) {
  auto tensors = as_bytes(data, bytes);
  messages.push_back({group_->recv(tensors, peer, tag), peer});
}

void Channel::send_payload(int peer, int tag, const void* data, int64_t bytes, std::vector<Message>& messages) {
  in_pieces(bytes, [&](int64_t offset, int64_t length) {
    send(peer, tag_of(tag, length), static_cast<const char*>(data) + offset, length, messages);
  });
}

void Channel::receive_payload(int peer, int tag, void* data, int64_t bytes, std::vector<Message>& messages) {
  in_pieces(bytes, [&](int64_t offset, int64_t length) {
    receive(peer, tag_of(tag, length), static_cast<char*>(data) + offset, length, messages);
  });
}

Channel::Outcome Channel::wait(Message& message, std::chrono::steady_clock::time_point deadline, std::string& cause) {
  using std::chrono::milliseconds;
  if (message.done) return Outcome::kDone;
  const auto remaining = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
  try {
    message.done = message.work->wait(std::max(remaining, milliseconds(1)));
    return message.done ? Outcome::kDone : Outcome::kWoken;
  } catch (const std::exception& error) {
    cause = error_text(error);
    if (has_timed_out(cause)) return Outcome::kTimedOut;
    if (!was_closed_here(cause)) return Outcome::kLost;
    return std::chrono::steady_clock::now() >= deadline ? Outcome::kTimedOut : Outcome::kClosedHere;
  }
}

bool Channel::has_come(Message& message) {
  std::string cause;
  Outcome outcome = Outcome::kWoken;
  while (outcome == Outcome::kWoken) outcome = wait(message, std::chrono::steady_clock::now(), cause); // a wake says nothing
  return outcome == Outcome::kDone;
}

void Channel::fail(const std::string& message) {
  {
    std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = message;
    failed_.notify_all();
  }
  if (options_.on_failure) options_.on_failure(message);
}

void Channel::disconnect(const std::string& message) {
  fail(message);
  std::lock_guard lock(sentinel_mutex_);
  for (auto& sentinel : sentinels_) has_come(sentinel); // the first that has not closes them
}

std::string Channel::await_failure() {
  std::unique_lock lock(mutex_);
  failed_.wait_for(lock, kFailureLimit, [&] { return !failure_.empty(); });
  return failure_;
}

void Channel::check_usable(const std::string& call) const {
  check_not_forked(call); // whose mutex may be locked for ever
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!closed_, call, ": the process group was destroyed");
  TORCH_CHECK(failure_.empty(), call, ": the group cannot be used after an earlier failure: ", failure_);
}

void Channel::keep_until_closed(std::shared_ptr<InFlight> exchange) {
  std::lock_guard lock(mutex_);
  if (!closed_) kept_.push_back(std::move(exchange)); // later nobody would release it, and it holds the channel
}

void Channel::retire(std::vector<Message> messages) {
  std::vector<Message> freed;
  std::lock_guard lock(mutex_);
  retired_.push_back(std::move(messages));
  if (retired_.size() <= kRetiredLists) return;
  freed.swap(retired_.front());
  retired_.pop_front();
}

std::vector<at::Tensor>& Channel::cache_for(int64_t bytes) { return bytes >= kLargeBuffer ? large_buffers_ : small_buffers_; }

at::Tensor Channel::take_buffer(int64_t bytes) {
  {
    std::lock_guard lock(mutex_);
    auto& cache = cache_for(bytes);
    auto best = cache.end();
    for (auto it = cache.begin(); it != cache.end(); ++it)
      if (it->numel() >= bytes && it->numel() <= 2 * bytes && (best == cache.end() || it->numel() < best->numel())) best = it;
    if (best != cache.end()) {
      auto buffer = std::move(*best);
      cache.erase(best);
      return buffer;
    }
  }
  return at::empty({bytes}, at::TensorOptions(at::kByte));
}

void Channel::return_buffer(at::Tensor buffer) {
  std::lock_guard lock(mutex_);
  auto& cache = cache_for(buffer.numel());
  cache.push_back(std::move(buffer));
  if (cache.size() > (&cache == &large_buffers_ ? kCachedLargeBuffers : kCachedSmallBuffers)) cache.erase(cache.begin());
}

void Channel::complete_in_background(std::shared_ptr<InFlight> exchange) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  auto& background = background_[exchange->order()];
  background.queue.push_back(std::move(exchange));
  if (!background.thread.joinable()) background.thread = std::thread([this, &background] { background_loop(background); });
  wake_background_.notify_all();
}

void Channel::background_loop(Background& background) {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_background_.wait(lock, [&] { return closed_ || !background.queue.empty(); });
    if (closed_) return;
    const auto exchange = std::move(background.queue.front());
    background.queue.pop_front();
    lock.unlock();
    exchange->complete();
    lock.lock();
  }
}

void Channel::begin_wait(InFlight* exchange) {
  std::lock_guard lock(mutex_);
  if (closed_) exchange->wake_because_the_channel_closes();
  waiting_.push_back(exchange);
}

void Channel::wake_if_closed(InFlight* exchange) const {
  std::lock_guard lock(mutex_);
  if (closed_) exchange->wake_because_the_channel_closes();
}

void Channel::end_wait(InFlight* exchange) {
  std::lock_guard lock(mutex_);
  waiting_.erase(std::find(waiting_.begin(), waiting_.end(), exchange));
}

// gloo does not report a lost connection to a message that is half transferred, so its waiter would sit out the timeout. The
// sentinels do notice, and this thread wakes the waiter. It does so after a long wait as well: when a wait of gloo's runs out,
// gloo closes the connections before this rank can say whom it misses.
void Channel::monitor_loop() {
  std::unique_lock lock(mutex_);
  while (!wake_monitor_.wait_for(lock, kMonitorInterval, [&] { return closed_; })) {
    if (waiting_.empty()) continue;
    const auto lost = lost_peers();
    const auto now = std::chrono::steady_clock::now();
    for (auto* exchange : waiting_)
      if (!lost.empty() || now >= exchange->wakes_from()) exchange->wake(lost);
  }
}

std::vector<int> Channel::lost_peers() {
  std::lock_guard lock(sentinel_mutex_);
  std::vector<int> lost;
  for (const auto& sentinel : sentinels_) {
    const int peer = sentinel.peer;
    if (seen_ended_[peer] > 0 || options_.watch->has_ended(options_.ranks[peer])) ++seen_ended_[peer];
    lost_[peer] = lost_[peer] || connection_lost(sentinel) || has_arrived(seen_ended_[peer]);
    if (lost_[peer]) lost.push_back(peer);
  }
  return lost;
}

bool Channel::has_lost(int64_t rank) {
  const auto peer = absl::c_find(options_.ranks, rank);
  if (peer == options_.ranks.end() || is_forked_copy()) return false;
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || !failure_.empty()) return false;
  }
  const auto is_lost = [&] {
    const std::lock_guard lock(sentinel_mutex_);
    return absl::c_any_of(sentinels_, [&](const auto& sentinel) {
      return sentinel.peer == peer - options_.ranks.begin() && connection_lost(sentinel);
    });
  };
  return is_lost() && !options_.watch->any_has_left(options_.departures);
}

// Whether all that a peer has sent is here, which was seen in `rounds` rounds to have ended.
bool Channel::has_arrived(int rounds) const {
  return rounds > kReadingRounds || (rounds > kArrivalRounds && !any_is_unread(sockets_));
}

bool Channel::connection_lost(const Message& sentinel) {
  try {
    sentinel.work->abort(); // so that the wait returns at once, or throws when the connection is gone
    sentinel.work->wait(std::chrono::milliseconds(1000));
    return false;
  } catch (const std::exception& error) {
    return !was_closed_here(error_text(error));
  }
}

std::vector<int64_t> Channel::ranks_of(const std::vector<int>& peers) const {
  std::vector<int64_t> ranks;
  for (const int peer : peers) ranks.push_back(options_.ranks[peer]);
  return ranks;
}

std::string Channel::blame(const std::vector<int>& peers) {
  return options_.watch->blame(ranks_of(peers), ranks_of(lost_peers()), options_.departures);
}

void Channel::check_not_forked(const std::string& call) const {
  TORCH_CHECK(!is_forked_copy(), call,
              ": this process was forked from a rank and has no part in its groups: it may join a job of "
              "its own, and must not use what the rank sharded");
}

void Channel::close() {
  if (is_forked_copy()) return;
  std::vector<std::shared_ptr<InFlight>> released; // they hold the channel
  std::vector<std::deque<std::shared_ptr<InFlight>>> dropped;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    for (auto* exchange : waiting_) exchange->wake_because_the_channel_closes();
    released.swap(kept_);
    for (auto& [order, background] : background_) dropped.push_back(std::exchange(background.queue, {}));
  }
  wake_monitor_.notify_all();
  wake_background_.notify_all();
  if (monitor_.joinable()) monitor_.join();
  for (auto& [order, background] : background_)
    if (background.thread.joinable()) background.thread.join();
}

void Channel::leave() {
  if (is_forked_copy()) return;
  if (options_.departures) options_.watch->announce_departure(options_.departures);
  disconnect("this rank has left the group");
  close();
}

} // namespace tessera::internal::gloo
