#include <tessera/parallel/context/sequence_parts.h>

#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::internal {

std::vector<HeldRange> SplitSequence::held_by(int64_t rank) const {
  std::vector<HeldRange> held;
  int64_t offset = 0;
  for (const auto& range : part_ranges(layout.order, length, ranks, rank)) {
    const PositionRange real{range.begin, std::min(range.end, length_without_padding())};
    if (real.size() > 0) held.push_back({rank, offset, real});
    offset += range.size();
  }
  return held;
}

at::Tensor part_of(const at::Tensor& whole, int64_t dim, const SplitSequence& sequence, int64_t rank) {
  std::vector<at::Tensor> ranges;
  for (const auto& range : part_ranges(sequence.layout.order, sequence.length, sequence.ranks, rank))
    ranges.push_back(whole.narrow(dim, range.begin, range.size()));
  return at::cat(ranges, dim);
}

at::Tensor whole_of(const std::vector<at::Tensor>& parts, int64_t dim, const SplitSequence& sequence) {
  std::vector<at::Tensor> ranges;
  for (const auto& held : held_ranges(sequence.layout.order, sequence.length, sequence.ranks))
    ranges.push_back(parts[static_cast<size_t>(held.rank)].narrow(dim, held.offset, held.positions.size()));
  return at::cat(ranges, dim);
}

void check_divides(const SplitSequence& sequence, const char* caller) {
  const auto divisor = divisor_of(sequence.layout.order, sequence.ranks), below = sequence.length / divisor * divisor;
  TORCH_CHECK_VALUE(sequence.length % divisor == 0, caller, ": a sequence of ", sequence.length, " does not divide into ",
                    divisor, " equal chunks, which the order ", name_of(sequence.layout.order), " needs on ", sequence.ranks,
                    " ranks; the nearest lengths that do are ", below, " and ", below + divisor);
}

} // namespace tessera::internal
