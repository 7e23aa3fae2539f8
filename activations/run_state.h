#pragma once

// Internal: what a second run of a function has to find as the first one did.

#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <utility>
#include <vector>

namespace tessera::internal {

/// The states of the default generators of the CPU and of the devices of some tensors.
class RngState {
 public:
  RngState() = default;
  /// Takes the states as they are now: of the CPU, of each accelerator that a tensor lies on, and of the current one where that
  /// is in use. None of a registered device that has no default generator.
  explicit RngState(const std::vector<at::Tensor>& tensors);
  /// The states of the same generators, as they are now.
  RngState now() const;
  void restore() const;
  bool empty() const { return states_.empty(); }
  bool operator==(const RngState& other) const;

 private:
  void add(const at::Generator& generator);
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// Whether autocast is on, and with which dtypes.
class AutocastState {
 public:
  /// Takes the state of this thread, as it is now.
  AutocastState();
  void restore() const;

 private:
  struct OfDevice {
    bool enabled;
    at::ScalarType dtype;
  };
  static constexpr std::array kDevices{c10::kCPU, c10::kCUDA, c10::kPrivateUse1};
  std::array<OfDevice, kDevices.size()> devices_{};
  bool caches_;
};

/// Runs of a scope in the autocast state of another time. What autocast cached in it goes with it.
class AutocastScope {
 public:
  explicit AutocastScope(const AutocastState& state);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  AutocastState before_;
};

} // namespace tessera::internal
