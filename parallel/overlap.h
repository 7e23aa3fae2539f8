#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// Whether a layer's product and the collective of its activation run beside each other (PyTorch: asynchronous tensor
/// parallelism).
enum class Overlap : uint8_t {
  kNever,    ///< one after the other, each whole
  kAlways,   ///< in chunks
  kMeasured, ///< as is faster: both are tried in the first call of each size, on all ranks, and the same is taken from then on
};

/// "never", "always", "measured".
std::string to_string(Overlap overlap);
/// Returns the one of that name. An error for any other name.
Overlap overlap_of(const std::string& name);

/// How layers overlap what they compute with what they send. It concerns sequence parallelism: layers whose activation is
/// gathered from a split of the sequence, and layers whose result is scattered to one, that are torch::nn::Linear or other
/// products with one weight. Others, and all layers under autocast, run as under kNever.
struct OverlapOptions {
  Overlap when = Overlap::kNever;
  /// Collectives in the place of one, at least 1; fewer where a rank has fewer positions. Together they send as many bytes.
  int64_t chunks = 4;
  /// Under kMeasured smaller products, of this rank, are not tried and run one after the other: multiplications and additions of
  /// pairs.
  int64_t smallest_measured = int64_t{1} << 24;
};

/// What was measured of the layers of one size under Overlap::kMeasured.
struct OverlapDecision {
  std::string layer; ///< the operator and the parameter of the first such layer, the shapes and the mesh
  double apart_seconds = 0, overlapped_seconds = 0; ///< of the slowest rank, the best of three
  bool overlaps = false;
  /// "aten::matmul beside the parameter up.weight: …: 1.24 ms apart, 0.98 ms overlapped: overlaps".
  std::string to_string() const;
};

/// All decisions of this rank so far, in their order: the log of what was measured. No communication.
std::vector<OverlapDecision> overlap_decisions();

} // namespace tessera
