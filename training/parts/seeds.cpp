#include <tessera/training/seeds.h>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <tessera/data/order/mesh_position.h>

namespace tessera {

namespace {

/// A bijection in which each bit of the result depends on all bits of `value`: the finalizer of SplitMix64.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

} // namespace

uint64_t derive_seed(uint64_t seed, int64_t step, int64_t index) {
  TORCH_CHECK_VALUE(step >= 0 && index >= 0, "derive_seed: step ", step, " and index ", index, " must not be negative");
  return mix(mix(mix(seed) ^ static_cast<uint64_t>(step)) ^ static_cast<uint64_t>(index));
}

void manual_seed(uint64_t seed, int64_t step, const DeviceMesh& data_mesh) {
  at::manual_seed(derive_seed(seed, step, internal::position_in(data_mesh, "manual_seed")));
}

} // namespace tessera
