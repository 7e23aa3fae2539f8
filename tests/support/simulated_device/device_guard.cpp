#include <tessera/tests/support/simulated_device/device_guard.h>

#include <tessera/tests/support/simulated_device/caching_allocator.h>
#include <tessera/tests/support/simulated_device/runtime.h>

#include <c10/util/Exception.h>

#include <array>
#include <atomic>

namespace tessera::testing::sim {

namespace {

const c10::Device kDevice(kDeviceType, 0);

c10::Stream stream_of(size_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, static_cast<c10::StreamId>(id)); }
size_t id_of(const c10::Stream& stream) { return static_cast<size_t>(stream.id()); }

void check_device(c10::Device device) {
  TORCH_CHECK(device.type() == kDeviceType && device.index() <= 0, "there is no simulated device ", device);
}

/// Streams that are handed out in turn.
class Pool {
 public:
  size_t next() { return streams_[next_++ % streams_.size()]; }

 private:
  static constexpr size_t kStreams = 8;
  static std::array<size_t, kStreams> make() {
    std::array<size_t, kStreams> streams{};
    for (auto& stream : streams) stream = Runtime::get().make_stream();
    return streams;
  }
  const std::array<size_t, kStreams> streams_ = make();
  std::atomic<size_t> next_{0};
};

Mark& mark_of(void* event) { return *static_cast<Mark*>(event); }

} // namespace

c10::DeviceType DeviceGuardImpl::type() const { return kDeviceType; }
c10::Device DeviceGuardImpl::getDevice() const { return kDevice; }

c10::Device DeviceGuardImpl::exchangeDevice(c10::Device device) const {
  check_device(device);
  return kDevice;
}

void DeviceGuardImpl::setDevice(c10::Device device) const { check_device(device); }
void DeviceGuardImpl::uncheckedSetDevice(c10::Device) const noexcept {}

c10::Stream DeviceGuardImpl::getStream(c10::Device) const { return stream_of(current_stream()); }
c10::Stream DeviceGuardImpl::getDefaultStream(c10::Device) const { return stream_of(0); }

c10::Stream DeviceGuardImpl::getStreamFromGlobalPool(c10::Device, bool is_high_priority) const {
  static auto* const pools = new std::array<Pool, 2>;
  return stream_of((*pools)[is_high_priority ? 1 : 0].next());
}

c10::Stream DeviceGuardImpl::getNewStream(c10::Device, int) const { return stream_of(Runtime::get().make_stream()); }

c10::Stream DeviceGuardImpl::exchangeStream(c10::Stream stream) const {
  return stream_of(exchange_current_stream(id_of(stream)));
}

bool DeviceGuardImpl::queryStream(const c10::Stream& stream) const {
  auto& runtime = Runtime::get();
  return runtime.query(runtime.record(id_of(stream)));
}

void DeviceGuardImpl::synchronizeStream(const c10::Stream& stream) const { Runtime::get().synchronize(id_of(stream), "stream"); }
void DeviceGuardImpl::synchronizeDevice(c10::DeviceIndex) const { Runtime::get().synchronize_all("device"); }

void DeviceGuardImpl::record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const {
  if (!*event) *event = new Mark;
  mark_of(*event) = Runtime::get().record(id_of(stream));
}

void DeviceGuardImpl::block(void* event, const c10::Stream& stream) const {
  if (event) Runtime::get().make_wait(id_of(stream), mark_of(event));
}

bool DeviceGuardImpl::queryEvent(void* event) const { return !event || Runtime::get().query(mark_of(event)); }

void DeviceGuardImpl::synchronizeEvent(void* event) const {
  if (event) Runtime::get().synchronize(mark_of(event), "event");
}

void DeviceGuardImpl::destroyEvent(void* event, c10::DeviceIndex) const noexcept { delete static_cast<Mark*>(event); }

double DeviceGuardImpl::elapsedTime(void* begin, void* end, c10::DeviceIndex) const {
  TORCH_CHECK(begin && end, "the time between events that were not recorded");
  return (mark_of(end).modelled_us - mark_of(begin).modelled_us) / 1000;
}

void DeviceGuardImpl::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  if (data.get()) CachingAllocator::get().record_stream(data.get(), id_of(stream));
}

} // namespace tessera::testing::sim
