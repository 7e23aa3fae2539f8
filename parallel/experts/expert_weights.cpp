#include <tessera/parallel/experts/expert_weights.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <vector>

#include <tessera/dtensor/layout/box.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/pieces.h>

namespace tessera::internal::experts {

namespace {

/// The weights [out, in] of one expert.
at::Tensor drawn(int64_t out, int64_t in, uint64_t seed) {
  const auto bound = 1 / std::sqrt(static_cast<double>(in));
  return at::empty({out, in}, at::kFloat).uniform_(-bound, bound, at::detail::createCPUGenerator(seed));
}

/// Writes the values of a part of the weights.
void draw_piece(const Piece& piece, c10::IntArrayRef sizes, WeightKind kind, uint64_t seed) {
  const auto& box = piece.box;
  const auto last = sizes.size() - 1;
  const auto part = [&](uint64_t of_expert) {
    const auto whole = drawn(sizes[last - 1], sizes[last], of_expert);
    return whole.narrow(0, box.offsets[last - 1], box.sizes[last - 1]).narrow(1, box.offsets[last], box.sizes[last]);
  };
  if (kind == WeightKind::kSingle) return void(piece.data.copy_(part(seed)));
  for (int64_t i = 0; i < box.sizes[0]; ++i)
    piece.data.select(0, i).copy_(part(seed_of(seed, static_cast<uint64_t>(box.offsets[0] + i))));
}

/// The parts that `values` have, which lie as this rank's of `weights`.
std::vector<Piece> pieces_of_values(const at::Tensor& values, const at::Tensor& weights) {
  const auto* meta = dtensor_meta(weights);
  if (meta) return pieces_of_part(values, *meta->spec, *meta->spec->mesh().coordinate());
  return {{whole(weights.sizes().vec()), values}};
}

} // namespace

uint64_t seed_of(uint64_t seed, uint64_t number) {
  uint64_t mixed = seed + (number + 1) * 0x9e3779b97f4a7c15; // SplitMix64
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 31);
}

void draw_weights(const at::Tensor& weights, WeightKind kind, uint64_t seed) {
  if (weights.is_meta()) return;
  const at::NoGradGuard no_grad;
  const auto* meta = dtensor_meta(weights);
  const auto& local = meta ? meta->local : weights;
  const auto values = at::empty(local.sizes(), at::kFloat);
  for (const auto& piece : pieces_of_values(values, weights)) draw_piece(piece, weights.sizes(), kind, seed);
  const auto own = values.to(local.options().requires_grad(false));
  weights.copy_(meta ? make_dtensor(own, meta->spec) : own);
}

} // namespace tessera::internal::experts
