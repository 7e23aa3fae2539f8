#include <tessera/fsdp/side_stream.h>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace tessera::internal {

namespace {

class StreamMark final : public WorkState {
 public:
  explicit StreamMark(const c10::Stream& stream) : event_(stream.device_type()), device_(stream.device()) {
    event_.record(stream);
  }
  void wait() override { event_.block(current_stream(device_)); }
  bool is_completed() override { return event_.query(); }

 private:
  c10::Event event_;
  c10::Device device_;
};

} // namespace

Work mark(const c10::Stream& stream) { return Work(std::make_shared<StreamMark>(stream)); }

StreamScope::StreamScope(const std::optional<c10::Stream>& stream) {
  if (!stream) return;
  const auto before = current_stream(stream->device());
  if (before == *stream) return;
  before_ = before;
  guard_.reset_stream(*stream);
  mark(before).wait();
}

StreamScope::~StreamScope() {
  if (!before_) return;
  try {
    const auto end = mark(*guard_.current_stream());
    guard_.reset();
    Work(end).wait();
  } catch (...) { // of a device that has failed
  }
}

SideStream::SideStream(c10::Device device) {
  if (is_asynchronous(device))
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

void SideStream::synchronize() const {
  if (stream_) stream_->synchronize();
}

void SideStream::follow_current() const {
  const auto current = current_stream(stream_->device());
  if (current == *stream_) return;
  c10::Event event(stream_->device_type());
  event.record(current);
  event.block(*stream_);
}

void BlockUsers::begin(c10::Device device) { home_ = current_stream_if_any(device); }

void BlockUsers::join() {
  if (!home_) return;
  const auto current = current_stream(home_->device());
  if (std::find(users_.begin(), users_.end(), current) != users_.end()) return;
  Work(last_).wait();
  users_.push_back(current);
}

std::optional<c10::Stream> BlockUsers::end() {
  if (!home_) return std::nullopt;
  const auto home = *std::exchange(home_, std::nullopt);
  const c10::StreamGuard guard(home);
  std::exchange(last_, Work()).wait();
  for (const auto& user : std::exchange(users_, {})) {
    if (user != home) mark(user).wait();
  }
  return home;
}

} // namespace tessera::internal
