#include <tessera/collectives/gloo/channel.h>

#include <tessera/collectives/error_text.h>
#include <tessera/collectives/gloo/exchange.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <cstdlib>

namespace tessera::gloo {

namespace {

constexpr int kSentinelTag = 1 << 29;
constexpr auto kMonitorInterval = std::chrono::milliseconds(100);
constexpr int64_t kLargeBuffer =
    1 << 20; // large and small buffers are cached apart: many small ones must not drive out a large one
constexpr size_t kCachedLargeBuffers = 4, kCachedSmallBuffers = 32;
constexpr size_t kRetiredLists = 24;

std::shared_ptr<::gloo::transport::Device> make_device(bool all_local) {
  using c10d::ProcessGroupGloo;
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"); interface && *interface)
    return ProcessGroupGloo::createDeviceForInterface(interface);
  return all_local ? ProcessGroupGloo::createDeviceForHostname("127.0.0.1") : ProcessGroupGloo::createDefaultDevice();
}

std::vector<at::Tensor> as_bytes(void* data, int64_t bytes) {
  return {at::from_blob(data, {bytes}, at::TensorOptions(at::kByte))};
}

template <typename Post>
void in_pieces(int64_t bytes, const Post& post) {
  for (int64_t offset = 0; offset < bytes; offset += Channel::kMaxMessageBytes)
    post(offset, std::min(bytes - offset, Channel::kMaxMessageBytes));
}

} // namespace

Channel::Channel(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const ChannelOptions& options)
    : rank_(rank), size_(size), options_(options) {
  auto group_options = c10d::ProcessGroupGloo::Options::create(options.timeout);
  group_options->devices.push_back(make_device(options.all_local));
  group_options->threads = 1;
  group_ = c10::make_intrusive<c10d::ProcessGroupGloo>(std::move(store), rank, size, group_options);
  watch_peers();
  monitor_ = std::thread(&Channel::monitor_loop, this);
}

Channel::~Channel() { close(); }

void Channel::watch_peers() {
  sentinel_byte_ = at::empty({1}, at::TensorOptions(at::kByte));
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) receive(peer, kSentinelTag, sentinel_byte_.data_ptr(), 1, sentinels_);
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
    send(peer, tag < 0 ? static_cast<int>(length) : tag, static_cast<const char*>(data) + offset, length, messages);
  });
}

void Channel::receive_payload(int peer, int tag, void* data, int64_t bytes, std::vector<Message>& messages) {
  in_pieces(bytes, [&](int64_t offset, int64_t length) {
    receive(peer, tag < 0 ? static_cast<int>(length) : tag, static_cast<char*>(data) + offset, length, messages);
  });
}

Channel::Outcome Channel::wait(const Message& message, std::chrono::steady_clock::time_point deadline, std::string& cause) {
  using std::chrono::milliseconds;
  const auto remaining = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
  try {
    if (message.work->wait(std::max(remaining, milliseconds(1)))) return Outcome::kDone;
    // Woken because the peer is gone or the channel closes. The message may have come before that.
    if (message.work->wait(milliseconds(1))) return Outcome::kDone;
  } catch (const std::exception& error) {
    cause = error_text(error);
    if (std::chrono::steady_clock::now() >= deadline) return Outcome::kTimedOut;
  }
  return Outcome::kLost;
}

void Channel::fail(const std::string& message) {
  std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = message;
}

void Channel::check_usable(const std::string& call) const {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!closed_, call, ": the process group was destroyed");
  TORCH_CHECK(failure_.empty(), call, ": the group cannot be used after an earlier failure: ", failure_);
}

void Channel::keep_until_closed(std::shared_ptr<Exchange> exchange) {
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

void Channel::complete_in_background(std::shared_ptr<Exchange> exchange) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  background_queue_.push_back(std::move(exchange));
  if (!background_.joinable()) background_ = std::thread(&Channel::background_loop, this);
  wake_background_.notify_one();
}

void Channel::background_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_background_.wait(lock, [&] { return closed_ || !background_queue_.empty(); });
    if (closed_) return;
    const auto exchange = std::move(background_queue_.front());
    background_queue_.pop_front();
    lock.unlock();
    exchange->complete();
    lock.lock();
  }
}

void Channel::begin_wait(Exchange* exchange) {
  std::lock_guard lock(mutex_);
  if (closed_) exchange->wake();
  waiting_.push_back(exchange);
}

void Channel::wake_if_closed(Exchange* exchange) const {
  std::lock_guard lock(mutex_);
  if (closed_) exchange->wake();
}

void Channel::end_wait(Exchange* exchange) {
  std::lock_guard lock(mutex_);
  waiting_.erase(std::find(waiting_.begin(), waiting_.end(), exchange));
}

// gloo does not report a lost connection to a message that is half transferred, so its waiter would sit out the timeout. The
// sentinels do notice, and this thread wakes the waiter.
void Channel::monitor_loop() {
  std::unique_lock lock(mutex_);
  while (!wake_monitor_.wait_for(lock, kMonitorInterval, [&] { return closed_; })) {
    if (waiting_.empty()) continue;
    for (const auto& sentinel : sentinels_)
      if (connection_lost(sentinel.peer))
        for (auto* exchange : waiting_) exchange->wake(sentinel.peer);
  }
}

bool Channel::connection_lost(int peer) {
  const auto& sentinel = *std::find_if(sentinels_.begin(), sentinels_.end(), [&](const auto& s) { return s.peer == peer; });
  try {
    sentinel.work->abort(); // so that the wait returns at once, or throws when the connection is gone
    sentinel.work->wait(std::chrono::milliseconds(1000));
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

void Channel::close() {
  std::vector<std::shared_ptr<Exchange>> released; // they hold the channel
  std::deque<std::shared_ptr<Exchange>> dropped;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    for (auto* exchange : waiting_) exchange->wake();
    released.swap(kept_);
    dropped.swap(background_queue_);
  }
  wake_monitor_.notify_all();
  wake_background_.notify_all();
  if (monitor_.joinable()) monitor_.join();
  if (background_.joinable()) background_.join();
}

} // namespace tessera::gloo
