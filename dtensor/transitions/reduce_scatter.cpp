#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal::redistribute {

namespace {

/// Reduces `rows` and keeps those of `parts[rank]`; the ranks' parts are padded to the longest.
at::Tensor scatter_rows(const at::Tensor& rows, const std::vector<Extent>& parts, const Transition& transition) {
  const auto& partial = std::get<Partial>(transition.from);
  const auto communicator = transition.communicator();
  const auto encoded = encode(rows, partial, *communicator).contiguous();
  int64_t longest = 0;
  for (const auto& part : parts) longest = std::max(longest, part.size);
  auto sizes = encoded.sizes().vec();
  sizes[0] = longest * transition.ranks();
  auto input = encoded;
  if (sizes[0] > encoded.size(0)) { // else the parts are even
    input = at::zeros(sizes, encoded.options());
    for (size_t r = 0; r < parts.size(); ++r) {
      input.narrow(0, static_cast<int64_t>(r) * longest, parts[r].size).copy_(encoded.narrow(0, parts[r].offset, parts[r].size));
    }
  }
  sizes[0] = longest;
  auto output = at::empty(sizes, encoded.options());
  const auto op = wire_op(partial, rows.scalar_type());
  wait_for(communicator->reduce_scatter(output.view(-1), input.view(-1), op, transition.label), transition);
  const auto kept = parts[transition.rank()].size;
  return after(output, transition, [kept, partial, dtype = rows.scalar_type()](const at::Tensor& reduced) {
    return decode(reduced.narrow(0, 0, kept), partial, dtype);
  });
}

} // namespace

at::Tensor reduce_scatter(const at::Tensor& local, const Transition& transition) {
  const auto ranks = transition.ranks(), rank = transition.rank();
  const auto my_sizes = part_sizes(transition.sizes, transition.to, ranks, rank);
  if (transition.numel() == 0) return at::empty(my_sizes, local.options());
  if (ranks == 1) return slice(all_reduce(local, transition), transition);
  std::vector<Extent> parts;
  if (const auto* ragged = std::get_if<RaggedShard>(&transition.to)) {
    for (int64_t r = 0; r < ranks; ++r) parts.push_back(ragged_extent(*ragged, r));
    auto rows_shape = my_sizes;
    rows_shape[0] = product(transition.sizes, 0, ragged->dim + 1);
    return scatter_rows(local.reshape(rows_shape), parts, transition);
  }
  const auto dim = std::get<Shard>(transition.to).dim;
  for (int64_t r = 0; r < ranks; ++r) parts.push_back(chunk_extent(transition.sizes[dim], ranks, r));
  return after(scatter_rows(local.movedim(dim, 0), parts, transition), transition,
               [dim](const at::Tensor& rows) { return rows.movedim(0, dim).contiguous(); });
}

} // namespace tessera::internal::redistribute
