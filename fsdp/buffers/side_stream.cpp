#include <tessera/fsdp/buffers/side_stream.h>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace tessera::internal {

namespace {

/// What was started on a stream, whose wait blocks the host.
class LaterOnStream final : public WorkState {
 public:
  LaterOnStream(const c10::Stream& stream, Work work) : stream_(stream), work_(std::move(work)) {}
  void wait() override {
    {
      const c10::StreamGuard guard(stream_);
      work_.wait();
    }
    mark(stream_).wait();
  }
  bool is_completed() override { return work_.is_completed(); }

 private:
  c10::Stream stream_;
  Work work_;
};

bool contains(const std::vector<c10::Stream>& streams, const c10::Stream& stream) {
  return std::find(streams.begin(), streams.end(), stream) != streams.end();
}

} // namespace

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

void use_on_current_stream(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const auto device = tensor.device();
  c10::impl::VirtualGuardImpl(device.type()).recordDataPtrOnStream(tensor.storage().data_ptr(), current_stream(device));
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

Work SideStream::later(Work work) const { return Work(std::make_shared<LaterOnStream>(*stream_, std::move(work))); }

void BlockUsers::begin(c10::Device device) { home_ = current_stream_if_any(device); }

void BlockUsers::wait_for(Work last) {
  last_ = std::move(last);
  waited_.clear();
}

void BlockUsers::wait_for_home() {
  if (home_) wait_for(mark(*home_));
}

void BlockUsers::join() {
  if (!home_) return;
  const auto current = current_stream(home_->device());
  if (contains(waited_, current)) return;
  Work(last_).wait();
  waited_.push_back(current);
  if (!contains(users_, current)) users_.push_back(current);
}

std::optional<c10::Stream> BlockUsers::end() {
  if (!home_) return std::nullopt;
  const auto home = *std::exchange(home_, std::nullopt);
  const c10::StreamGuard guard(home);
  waited_.clear();
  std::exchange(last_, Work()).wait();
  for (const auto& user : std::exchange(users_, {})) {
    if (user != home) mark(user).wait();
  }
  return home;
}

} // namespace tessera::internal
