#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace tessera::testing::sim {

/// Streams and events of the one device of a process, as `c10::Stream`, `c10::Event` and the device-neutral guards use them.
struct DeviceGuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override;
  c10::Device getDevice() const override;
  c10::Device exchangeDevice(c10::Device device) const override;
  void setDevice(c10::Device device) const override;
  void uncheckedSetDevice(c10::Device device) const noexcept override;
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device device) const override;
  c10::Stream getDefaultStream(c10::Device device) const override;
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override;
  c10::Stream getNewStream(c10::Device device, int priority) const override;
  c10::Stream exchangeStream(c10::Stream stream) const override;
  bool queryStream(const c10::Stream& stream) const override;
  void synchronizeStream(const c10::Stream& stream) const override;
  void synchronizeDevice(c10::DeviceIndex device) const override;

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag flag) const override;
  void block(void* event, const c10::Stream& stream) const override;
  bool queryEvent(void* event) const override;
  void synchronizeEvent(void* event) const override;
  void destroyEvent(void* event, c10::DeviceIndex device) const noexcept override;
  /// In milliseconds of modelled time.
  double elapsedTime(void* begin, void* end, c10::DeviceIndex device) const override;

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

} // namespace tessera::testing::sim
