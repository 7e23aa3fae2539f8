#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>

#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal::redistribute {

namespace {

/// `rows` of every rank, padded to `count` each, one after another. Dim 0 of `local` is what is gathered.
at::Tensor gather_padded(const at::Tensor& local, int64_t count, const Transition& transition) {
  auto sizes = local.sizes().vec();
  sizes[0] = count;
  auto mine = local;
  if (local.size(0) < count) {
    mine = at::empty(sizes, local.options());
    mine.narrow(0, 0, local.size(0)).copy_(local);
    mine.narrow(0, local.size(0), count - local.size(0)).zero_();
  }
  sizes[0] = count * transition.ranks();
  auto all = at::empty(sizes, local.options());
  wait_for(transition.communicator()->all_gather_into(all.view(-1), to_send(mine, local, transition).view(-1), transition.label),
           transition);
  return all;
}

at::Tensor gather_shard(const at::Tensor& local, const Transition& transition) {
  const auto dim = std::get<Shard>(transition.from).dim;
  const auto total = transition.sizes[dim], count = chunk_extent(total, transition.ranks(), 0).size;
  // Only the last non-empty chunk is short, so the padding is all at the end.
  return after(gather_padded(local.movedim(dim, 0), count, transition), transition,
               [dim, total](const at::Tensor& all) { return all.narrow(0, 0, total).movedim(0, dim).contiguous(); });
}

at::Tensor broadcast_whole(const at::Tensor& local, int64_t owner, const Transition& transition) {
  auto whole = transition.rank() == owner ? local.clone(at::MemoryFormat::Contiguous).view(transition.sizes)
                                          : at::empty(transition.sizes, local.options());
  wait_for(transition.communicator()->broadcast(whole.view(-1), static_cast<int>(owner), transition.label), transition);
  return whole;
}

at::Tensor gather_ragged(const at::Tensor& local, const Transition& transition) {
  const auto& extents = std::get<RaggedShard>(transition.from).extents;
  const auto largest = std::max_element(extents.begin(), extents.end());
  const auto owners = std::count_if(extents.begin(), extents.end(), [](int64_t extent) { return extent > 0; });
  if (owners == 1) return broadcast_whole(local, std::distance(extents.begin(), largest), transition);
  const auto count = *largest;
  return after(gather_padded(local, count, transition), transition,
               [extents, count, sizes = transition.sizes](const at::Tensor& all) {
                 std::vector<at::Tensor> parts;
                 for (size_t r = 0; r < extents.size(); ++r)
                   parts.push_back(all.narrow(0, static_cast<int64_t>(r) * count, extents[r]));
                 return at::cat(parts).view(sizes);
               });
}

} // namespace

at::Tensor all_gather(const at::Tensor& local, const Transition& transition) {
  if (transition.ranks() == 1) return local.reshape(transition.sizes);
  if (transition.numel() == 0) return at::empty(transition.sizes, local.options());
  if (std::holds_alternative<RaggedShard>(transition.from)) return gather_ragged(local, transition);
  return gather_shard(local, transition);
}

} // namespace tessera::internal::redistribute
