#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal::redistribute {

at::Tensor all_to_all(const at::Tensor& local, const Transition& transition) {
  const auto ranks = transition.ranks(), rank = transition.rank();
  const auto from = std::get<Shard>(transition.from).dim, to = std::get<Shard>(transition.to).dim;
  if (ranks == 1) return local;
  if (transition.numel() == 0) return at::empty(part_sizes(transition.sizes, transition.to, ranks, rank), local.options());
  std::vector<at::Tensor> parts;
  std::vector<std::vector<int64_t>> shapes;
  std::vector<int64_t> input_splits, output_splits;
  for (int64_t r = 0; r < ranks; ++r) {
    const auto wanted = chunk_extent(transition.sizes[to], ranks, r);
    parts.push_back(local.narrow(to, wanted.offset, wanted.size).reshape(-1));
    input_splits.push_back(parts.back().numel());
    shapes.push_back(part_sizes(transition.sizes, transition.from, ranks, r));
    shapes.back()[to] = chunk_extent(transition.sizes[to], ranks, rank).size;
    output_splits.push_back(product(shapes.back(), 0, shapes.back().size()));
  }
  const auto input = at::cat(parts);
  int64_t received = 0;
  for (const auto split : output_splits) received += split;
  auto output = at::empty({received}, local.options());
  wait_for(transition.communicator()->all_to_all(output, input, output_splits, input_splits, transition.label), transition);
  return after(output, transition, [from, shapes, output_splits](const at::Tensor& parts) {
    std::vector<at::Tensor> pieces;
    int64_t offset = 0;
    for (size_t r = 0; r < shapes.size(); offset += output_splits[r++]) {
      pieces.push_back(parts.narrow(0, offset, output_splits[r]).view(shapes[r]));
    }
    return at::cat(pieces, from);
  });
}

} // namespace tessera::internal::redistribute
