#include <tessera/activations/run_state.h>

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>

namespace tessera::internal {

namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  const auto* begin = static_cast<const char*>(a.const_data_ptr());
  const auto* other = static_cast<const char*>(b.const_data_ptr());
  return a.nbytes() == b.nbytes() && std::equal(begin, begin + a.nbytes(), other);
}

/// The accelerators that the program computes on now, and those of `tensors`.
std::vector<at::Device> accelerators(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Device> devices;
  for (const auto& tensor : tensors) {
    if (tensor.defined() && (tensor.is_cuda() || tensor.is_privateuseone())) devices.push_back(tensor.device());
  }
  if (at::isPrivateUse1HooksRegistered()) devices.push_back(c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getDevice());
  if (!at::Context::hasCUDA()) return devices;
  const auto& hooks = at::detail::getCUDAHooks();
  const auto current = hooks.current_device();
  if (current >= 0 && hooks.hasPrimaryContext(current)) devices.emplace_back(c10::kCUDA, current);
  return devices;
}

} // namespace

RngState::RngState(const std::vector<at::Tensor>& tensors) {
  auto& context = at::globalContext();
  add(context.defaultGenerator(c10::kCPU));
  for (const auto& device : accelerators(tensors)) {
    try {
      add(context.defaultGenerator(device));
    } catch (const c10::NotImplementedError&) { // a registered device without one
    }
  }
}

void RngState::add(const at::Generator& generator) {
  const auto is_there = [&](const auto& each) { return each.first == generator; };
  if (std::none_of(states_.begin(), states_.end(), is_there)) states_.emplace_back(generator, state_of(generator));
}

RngState RngState::now() const {
  RngState state;
  for (const auto& [generator, _] : states_) state.add(generator);
  return state;
}

void RngState::restore() const {
  for (auto [generator, state] : states_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

bool RngState::operator==(const RngState& other) const {
  return std::equal(states_.begin(), states_.end(), other.states_.begin(), other.states_.end(),
                    [](const auto& a, const auto& b) { return a.first == b.first && same_bytes(a.second, b.second); });
}

AutocastState::AutocastState() : caches_(at::autocast::is_autocast_cache_enabled()) {
  for (size_t i = 0; i < kDevices.size(); ++i)
    devices_[i] = {at::autocast::is_autocast_enabled(kDevices[i]), at::autocast::get_autocast_dtype(kDevices[i])};
}

void AutocastState::restore() const {
  for (size_t i = 0; i < kDevices.size(); ++i) {
    at::autocast::set_autocast_enabled(kDevices[i], devices_[i].enabled);
    at::autocast::set_autocast_dtype(kDevices[i], devices_[i].dtype);
  }
  at::autocast::set_autocast_cache_enabled(caches_);
}

AutocastScope::AutocastScope(const AutocastState& state) {
  at::autocast::increment_nesting();
  state.restore();
}

AutocastScope::~AutocastScope() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  before_.restore();
}

} // namespace tessera::internal
