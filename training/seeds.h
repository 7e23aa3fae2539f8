#pragma once

#include <cstdint>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// A seed made of `seed`, a step and the index of a rank, so that a run which is resumed at a step draws what it would have
/// drawn, and nothing has to be saved. Equal arguments give equal seeds on every machine and in every version; others give seeds
/// that have nothing to do with each other. An error for a negative step or index. Local.
uint64_t derive_seed(uint64_t seed, int64_t step, int64_t index);

/// Seeds LibTorch's generators of all devices for `step`, for what each rank draws by itself (dropout, augmentation): the index
/// is this rank's position in `data_mesh`, the ranks that have different data. An error for a rank outside of it. Local.
///
/// What a whole DTensor draws (`normal_` on a sharded parameter) needs generators that agree on all of its ranks: before that,
/// call torch::manual_seed with the same number everywhere.
void manual_seed(uint64_t seed, int64_t step, const DeviceMesh& data_mesh);

} // namespace tessera
