#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace tessera::testing::sim {

/// What LibTorch asks an accelerator.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void* data) const override;

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override;
  at::Generator getNewGenerator(c10::DeviceIndex device) const override;

  bool isPinnedPtr(const void* data) const override;
  c10::Allocator* getPinnedMemoryAllocator() const override;
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};

/// Tensor::resize_. What the memory holds moves with the current stream, where LibTorch's own would copy it on the host at once.
const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format = std::nullopt);

} // namespace tessera::testing::sim
