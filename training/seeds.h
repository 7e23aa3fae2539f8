#pragma once

#include <cstdint>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// A seed computed from `seed`, a step and the index of a rank. So a run that is resumed at a step draws the same numbers, and
/// nothing has to be saved. Equal arguments give equal seeds on every machine and in every version. Different arguments give
/// unrelated seeds. An error for a negative step or index. Local.
uint64_t derive_seed(uint64_t seed, int64_t step, int64_t index);

/// Seeds LibTorch's generators of all devices for `step`, for numbers that each rank draws by itself (dropout, augmentation). The
/// index is this rank's position in `data_mesh`, the ranks that have different data. An error for a rank outside of it. Local.
///
/// Random operators on a DTensor (`normal_` on a sharded parameter) need generators that agree on all of its ranks: before these,
/// call torch::manual_seed with the same number on all ranks.
void manual_seed(uint64_t seed, int64_t step, const DeviceMesh& data_mesh);

} // namespace tessera
