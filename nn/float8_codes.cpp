#include <tessera/nn/float8_codes.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <tessera/activations/version_watch.h>
#include <tessera/base/per_thread.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/in_backward.h>

namespace tessera::internal {

namespace {

/// The largest number of float8_e4m3fn is 0.875 · 2⁹, that of float8_e5m2 0.875 · 2¹⁶.
constexpr double kLargestMantissa = 0.875;
constexpr double kInverseOfE4m3 = 0x1p-9, kInverseOfE5m2 = 0x1p-16;
/// Smaller numbers are scaled as this one, of which a scale and its inverse are ordinary numbers. So are zeros.
constexpr double kSmallestLargest = 0x1p-100;

/// Which numbers share a scale: all, or those along one dim of a matrix.
std::vector<int64_t> scaled_dims(int64_t ndim, Float8Scaling scaling, int64_t along) {
  if (scaling == Float8Scaling::kRows) return {along};
  std::vector<int64_t> all(static_cast<size_t>(ndim));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// `largest` with what other ranks have, where a DTensor lacks that.
at::Tensor of_all_ranks(const at::Tensor& largest) {
  const auto* const meta = dtensor_meta(largest);
  if (!meta) return largest.clone();
  auto placements = meta->spec->placements();
  std::replace_if(placements.begin(), placements.end(), is_partial, Replicate{});
  return move(largest, placements, "the scale of a float8_linear");
}

/// Of fp16 in fp32, which has the exponents of the scale: a read of a sharded weight casts what is beside it to its own dtype, in
/// which a small scale is 0.
at::Tensor quotient(const at::Tensor& numbers, const at::Tensor& scale) {
  if (numbers.scalar_type() == at::kHalf) return numbers.to(at::kFloat).div_(scale);
  return numbers / (numbers.scalar_type() == at::kBFloat16 ? scale.to(at::kBFloat16) : scale);
}

/// What the same bytes are in another dtype of one byte: the collectives move these.
at::Tensor in_bytes(const at::Tensor& codes, at::ScalarType dtype) {
  const auto& meta = *dtensor_meta(codes);
  const auto& spec = *meta.spec;
  return make_dtensor(meta.local.contiguous().view(dtype), Spec::intern(spec.mesh(), spec.placements(), spec.sizes(), dtype));
}

/// Says where the numbers lie that a product takes beside a weight that its mesh splits: whole on a mesh dim that splits the
/// weight, where they are split otherwise than along their last dim. Nothing for other weights, and where rows stay split.
std::optional<Placements> beside(const at::Tensor& numbers, const SpecPtr& weight) {
  const auto* meta = dtensor_meta(numbers);
  if (!meta || !weight || meta->spec->mesh() != weight->mesh() || weight->is_replicated()) return std::nullopt;
  auto placements = meta->spec->placements();
  for (size_t dim = 0; dim < placements.size(); ++dim) {
    if (!is_sharded(placements[dim]) || shards_dim(placements[dim], numbers.dim() - 1)) continue;
    if (!is_sharded(weight->placements()[dim])) return std::nullopt;
    placements[dim] = Replicate{};
  }
  return placements;
}

/// The codes that were gathered last, for q, k and v, which have one input. Its `data()`, which counts versions of its own, and
/// `local()` are written too: what lies on this rank knows of these.
struct Gathered {
  Gathered(const at::Tensor& numbers, at::ScalarType of, Float8Codes gathered)
      : source(numbers.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr()),
        watch(numbers),
        watch_of_part(dtensor_meta(numbers)->local),
        dtype(of),
        codes(std::move(gathered)) {}
  bool serves(const at::Tensor& numbers, at::ScalarType wanted) const {
    return source._unsafe_get_target() == dtensor_meta(numbers) && dtype == wanted && !watch.has_changed() &&
           !watch_of_part.has_changed();
  }

  c10::weak_intrusive_ptr<c10::BackendMeta> source; ///< the address alone might be another's by now
  VersionWatch watch, watch_of_part;
  at::ScalarType dtype;
  Float8Codes codes;
};

using LastGathered = std::optional<Gathered>;

struct LastOfThread {
  std::shared_ptr<LastGathered> forward;
  std::weak_ptr<LastGathered> backward; ///< a callback of the backward owns it, and ends with it, perhaps in another thread
};

constinit PerThread<LastOfThread> last_of_thread;

std::shared_ptr<LastGathered> last_gathered() {
  auto& last = *last_of_thread;
  if (!in_backward()) {
    if (!last.forward) last.forward = std::make_shared<LastGathered>();
    return last.forward;
  }
  auto of_backward = last.backward.lock();
  if (!of_backward) {
    last.forward.reset(); // the memory of what it had is let go before more is needed
    last.backward = of_backward = std::make_shared<LastGathered>();
    torch::autograd::Engine::get_default_engine().queue_callback([of_backward] {});
  }
  return of_backward;
}

} // namespace

at::Tensor largest_in_float8(const at::Tensor& numbers, Float8Scaling scaling, int64_t dim) {
  const auto dims = scaled_dims(numbers.dim(), scaling, dim);
  auto sizes = numbers.sizes().vec();
  for (const auto each : dims) sizes[static_cast<size_t>(each)] = 1;
  if (numbers.numel() == 0) return numbers.new_zeros(sizes, at::kFloat);
  return at::linalg_vector_norm(numbers, std::numeric_limits<double>::infinity(), dims, /*keepdim=*/true).to(at::kFloat);
}

at::Tensor float8_scale(const at::Tensor& largest, at::ScalarType dtype) {
  if (largest.is_meta()) return of_all_ranks(largest); // frexp has no kernel there, which would take that
  const auto bounded = largest.clamp_min(kSmallestLargest);
  const auto mantissa = std::get<0>(at::frexp(bounded)); // in [0.5, 1)
  const double inverse = dtype == at::kFloat8_e5m2 ? kInverseOfE5m2 : kInverseOfE4m3;
  return bounded / mantissa * at::where(mantissa > kLargestMantissa, 2 * inverse, inverse);
}

Float8Codes encode_float8(const at::Tensor& numbers, at::ScalarType dtype, Float8Scaling scaling, int64_t along) {
  const auto scale = float8_scale(largest_in_float8(numbers, scaling, along), dtype);
  auto codes = quotient(numbers, scale).to(dtype);
  return {std::move(codes), numbers.dim() == 2 ? scale : scale.reshape({1, 1})};
}

at::Tensor as_matrix(const at::Tensor& tensor) { return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)}); }

SpecPtr place_of(const at::Tensor& weight) {
  const auto* const meta = dtensor_meta(weight);
  return meta ? meta->spec : nullptr;
}

bool gathers_float8(const at::Tensor& numbers, Float8Scaling scaling, const SpecPtr& weight) {
  return scaling == Float8Scaling::kTensor && beside(numbers, weight).has_value();
}

Float8Codes rows_in_float8(const at::Tensor& numbers, at::ScalarType dtype, Float8Scaling scaling, int64_t along,
                           const SpecPtr& weight) {
  const auto placements = scaling == Float8Scaling::kTensor ? beside(numbers, weight) : std::nullopt;
  if (!placements) return encode_float8(as_matrix(numbers), dtype, scaling, along);
  if (*placements == dtensor_meta(numbers)->spec->placements()) {
    const auto own = encode_float8(numbers, dtype, scaling, along);
    return {as_matrix(own.codes), own.scale};
  }
  const auto held = last_gathered();
  auto& last = *held;
  if (last && last->serves(numbers, dtype)) return last->codes;
  last.reset(); // before its memory is needed
  const auto own = encode_float8(numbers, dtype, scaling, along);
  const auto whole = in_bytes(move(in_bytes(own.codes, at::kByte), *placements, "the codes of a float8_linear"), dtype);
  Float8Codes codes{as_matrix(whole), own.scale};
  const bool counts_versions = !numbers.is_inference() && !dtensor_meta(numbers)->local.is_inference();
  if (counts_versions) last.emplace(numbers, dtype, codes); // of others nothing says whether they were written
  return codes;
}

} // namespace tessera::internal
