#include <tessera/fsdp/layout/shard_plan.h>

#include <ATen/ceil_div.h>

#include <algorithm>
#include <optional>

namespace tessera::internal {

namespace {

/// A shard of up to so many bytes may have room for what other ranks own, so that one copy casts it. `packed` is its size
/// without.
int64_t most_bytes_for_one_cast(int64_t packed) {
  constexpr int64_t kPage = 4096;
  return packed + packed / 8 + kPage;
}

int64_t size_of(c10::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

ShardPlan pack(const GroupLayout& layout, const std::vector<ParameterDtypes>& dtypes, size_t rank) {
  ShardPlan plan{.casts = true};
  for (size_t i = 0; i < dtypes.size(); ++i) {
    plan.offsets.push_back(plan.bytes);
    plan.bytes += at::round_up(layout.parameters[i].pieces[rank].numel * size_of(dtypes[i].own), kParameterAlignment);
  }
  return plan;
}

/// How much wider all are than what is sent of them, where they are cast alike, to a dtype that is no wider: then what is aligned
/// in it is in the shard too.
std::optional<int64_t> widening_of(const std::vector<ParameterDtypes>& dtypes) {
  const auto& [own, unsharded] = dtypes[0];
  const bool are_alike = std::all_of(dtypes.begin(), dtypes.end(), [&](const auto& each) { return each == dtypes[0]; });
  if (!are_alike || size_of(own) < size_of(unsharded)) return std::nullopt;
  return size_of(own) / size_of(unsharded);
}

} // namespace

ShardPlan plan_shard(const GroupLayout& layout, const std::vector<ParameterDtypes>& dtypes, bool extends, size_t rank) {
  const bool differ = std::any_of(dtypes.begin(), dtypes.end(), [](const auto& each) { return each.own != each.unsharded; });
  auto packed = pack(layout, dtypes, rank);
  const auto widening = differ ? widening_of(dtypes) : 1;
  if (extends || !widening) return packed;
  const int64_t bytes = *widening * (layout.shard_bytes + layout.replicated_bytes);
  if (differ && bytes > most_bytes_for_one_cast(packed.bytes)) return packed;
  ShardPlan plan{.bytes = bytes, .casts = differ, .casts_whole = differ};
  for (const auto& parameter : layout.parameters) plan.offsets.push_back(*widening * parameter.pieces[rank].shard_offset);
  return plan;
}

} // namespace tessera::internal
