#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <numeric>

#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/redistribute/redistribute.h>

namespace tessera::internal {

namespace {

/// `spec` with Replicate where it has no Shard.
SpecPtr plain_spec(const Spec& spec) {
  auto placements = spec.placements();
  for (auto& placement : placements) {
    if (!std::holds_alternative<Shard>(placement)) placement = Replicate{};
  }
  return spec.with(placements);
}

/// The box of every rank, in the order of the ranks.
std::vector<LocalBox> boxes_of(const Spec& spec) {
  std::map<int64_t, LocalBox> by_rank;
  const auto& mesh = spec.mesh();
  for (size_t i = 0; i < mesh.ranks().size(); ++i) {
    const auto coordinate = coordinate_of(static_cast<int64_t>(i), mesh.shape());
    by_rank[mesh.ranks()[i]] = local_box(spec.sizes(), mesh.shape(), coordinate, spec.placements());
  }
  std::vector<LocalBox> boxes;
  for (auto& [rank, box] : by_rank) boxes.push_back(std::move(box));
  return boxes;
}

/// The common part of two boxes; without elements where they are disjoint.
LocalBox common(const LocalBox& a, const LocalBox& b) {
  auto result = a;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    result.offsets[d] = std::max(a.offsets[d], b.offsets[d]);
    result.sizes[d] = std::max<int64_t>(0, std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]) - result.offsets[d]);
  }
  return result;
}

int64_t numel(const LocalBox& box) { return product(box.sizes, 0, box.sizes.size()); }

/// The part of `local`, which is `held`, that lies in `wanted`.
at::Tensor part(at::Tensor local, const LocalBox& held, const LocalBox& wanted) {
  for (size_t d = 0; d < held.sizes.size(); ++d) {
    local = local.narrow(static_cast<int64_t>(d), wanted.offsets[d] - held.offsets[d], wanted.sizes[d]);
  }
  return local;
}

/// Of the ranks that hold the box of `source`, the one that sends it to `receiver`: that itself, else they take turns.
size_t sender(const std::vector<LocalBox>& held, size_t source, size_t receiver) {
  if (held[receiver] == held[source]) return receiver;
  std::vector<size_t> holders;
  for (size_t r = 0; r < held.size(); ++r) {
    if (held[r] == held[source]) holders.push_back(r);
  }
  return holders[receiver % holders.size()];
}

/// What this rank sends to and receives from each, in the order of the ranks.
struct Exchange {
  std::vector<at::Tensor> sent; // flat
  std::vector<LocalBox> received;
  std::vector<int64_t> input_splits, output_splits; // in elements
};

Exchange plan_exchange(const at::Tensor& local, const std::vector<LocalBox>& held, const std::vector<LocalBox>& wanted,
                       size_t me) {
  const size_t ranks = held.size();
  Exchange plan{{local.reshape(-1).narrow(0, 0, 0)}, {}, std::vector<int64_t>(ranks, 0), std::vector<int64_t>(ranks, 0)};
  for (size_t r = 0; r < ranks; ++r) {
    const auto mine = common(held[me], wanted[r]), theirs = common(held[r], wanted[me]);
    if (numel(mine) > 0 && sender(held, me, r) == me) {
      plan.sent.push_back(part(local, held[me], mine).reshape(-1));
      plan.input_splits[r] = numel(mine);
    }
    const bool sends = numel(theirs) > 0 && sender(held, r, me) == r;
    if (sends) plan.output_splits[r] = numel(theirs);
    plan.received.push_back(sends ? theirs : LocalBox{});
  }
  return plan;
}

} // namespace

std::pair<at::Tensor, SpecPtr> only_shards(const at::Tensor& dtensor, const char* label) {
  auto& meta = meta_of(dtensor, label);
  const auto plain = plain_spec(*meta.spec);
  return {redistribute_local(dtensor, meta, plain, label), plain};
}

at::Tensor move_between_meshes(const at::Tensor& local, const Spec& from, const Spec& to, std::string_view label) {
  auto ranks = from.mesh().ranks(), others = to.mesh().ranks();
  std::sort(ranks.begin(), ranks.end());
  std::sort(others.begin(), others.end());
  TORCH_CHECK(ranks == others && from.mesh().device_type() == to.mesh().device_type(), label,
              ": a tensor moves only between meshes over the same ranks, not from ", from.to_string(), " to ",
              to.mesh().to_string());
  if (!from.on_mesh()) return local;
  const auto device = from.mesh().device();
  if (local.is_cpu() && !device.is_cpu()) return move_between_meshes(local.to(device), from, to, label).to(at::kCPU); // offloaded
  const auto middle = plain_spec(to);
  const auto line = make_device_mesh(from.mesh().device_type(), {static_cast<int64_t>(ranks.size())}, ranks);
  const auto held = boxes_of(from), wanted = boxes_of(*middle);
  const auto me = static_cast<size_t>(line.local_rank());
  const auto [sent, received, input_splits, output_splits] = plan_exchange(local, held, wanted, me);
  auto buffer = at::empty({std::accumulate(output_splits.begin(), output_splits.end(), int64_t{0})}, local.options());
  if (from.numel() > 0) {
    line.communicator()->all_to_all(buffer, at::cat(sent), output_splits, input_splits, label).wait();
  }
  auto result = at::empty(wanted[me].sizes, local.options());
  int64_t position = 0;
  for (size_t r = 0; r < ranks.size(); position += output_splits[r++]) {
    if (output_splits[r] == 0) continue;
    part(result, wanted[me], received[r]).copy_(buffer.narrow(0, position, output_splits[r]).view(received[r].sizes));
  }
  return redistribute_local(result, *middle, to, label);
}

} // namespace tessera::internal
