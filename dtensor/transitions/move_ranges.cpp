#include <ATen/ops/empty.h>

#include <algorithm>

#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal::redistribute {

namespace {

int64_t overlap(const Extent& a, const Extent& b) {
  return std::max<int64_t>(0, std::min(a.offset + a.size, b.offset + b.size) - std::max(a.offset, b.offset));
}

} // namespace

at::Tensor move_ranges(const at::Tensor& local, const Transition& transition) {
  const auto ranks = transition.ranks(), rank = transition.rank();
  const auto sizes = part_sizes(transition.sizes, transition.to, ranks, rank);
  const auto from = flat_ranges(transition.sizes, transition.from, ranks),
             to = flat_ranges(transition.sizes, transition.to, ranks);
  if (from == to) return local.reshape(sizes);
  std::vector<int64_t> input_splits, output_splits;
  for (int64_t r = 0; r < ranks; ++r) {
    input_splits.push_back(overlap(from[rank], to[r]));
    output_splits.push_back(overlap(from[r], to[rank]));
  }
  auto output = at::empty(sizes, local.options());
  const auto input = to_send(local, local, transition);
  wait_for(transition.communicator()->all_to_all(output.view(-1), input.view(-1), output_splits, input_splits, transition.label),
           transition);
  return output;
}

} // namespace tessera::internal::redistribute
