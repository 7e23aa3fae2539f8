#include <tessera/fsdp/layout/group_layout.h>

#include <ATen/ceil_div.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <set>
#include <utility>

namespace tessera::internal {

namespace {

int64_t product(const std::vector<int64_t>& sizes, size_t from) {
  return std::accumulate(sizes.begin() + static_cast<int64_t>(std::min(from, sizes.size())), sizes.end(), int64_t{1},
                         std::multiplies<>());
}

bool is_scalar(const ParameterShape& parameter) { return parameter.sizes.empty(); }
int64_t item_bytes(const ParameterShape& parameter) { return static_cast<int64_t>(c10::elementSize(parameter.unsharded_dtype)); }
int64_t row_bytes(const ParameterShape& parameter) { return product(parameter.sizes, 1) * item_bytes(parameter); }
int64_t bytes(const ParameterShape& parameter) { return parameter.numel() * item_bytes(parameter); }

/// One parameter at byte `offset`, cut at every multiple of `shard_bytes`.
struct Cut {
  int64_t offset, size, shard_bytes;

  bool crosses() const { return size > 0 && offset / shard_bytes != (offset + size - 1) / shard_bytes; }
  int64_t first_boundary() const { return (offset / shard_bytes + 1) * shard_bytes - offset; }
  bool falls_between(int64_t unit) const {
    if (!crosses()) return true;
    const bool several = first_boundary() + shard_bytes < size;
    return first_boundary() % unit == 0 && (!several || shard_bytes % unit == 0);
  }
};

/// The next offset, at most one row further, from which the parameter is cut between rows; `offset` when there is none.
int64_t align_to_rows(const ParameterShape& parameter, int64_t offset, int64_t shard_bytes) {
  const int64_t row = row_bytes(parameter), size = bytes(parameter);
  if (row == 0 || row >= shard_bytes) return offset;
  const int64_t boundary = Cut{offset, size, shard_bytes}.first_boundary();
  // The parameter stays where it is, or has whole rows before this boundary, begins at it, or has whole rows before the next.
  for (const int64_t shift : {int64_t{0}, boundary % row, boundary, boundary + shard_bytes % row}) {
    if (shift > row || shift % kParameterAlignment != 0) continue;
    if (Cut{offset + shift, size, shard_bytes}.falls_between(row)) return offset + shift;
  }
  return offset;
}

std::vector<int64_t> place_ragged(const std::vector<ParameterShape>& parameters, int64_t shard_bytes, bool between_rows,
                                  int64_t& end) {
  std::vector<int64_t> offsets;
  end = 0;
  for (const auto& parameter : parameters) {
    if (is_scalar(parameter)) {
      offsets.push_back(0);
      continue;
    }
    int64_t offset = at::round_up(end, kParameterAlignment);
    if (between_rows) offset = align_to_rows(parameter, offset, shard_bytes);
    offsets.push_back(offset);
    end = offset + bytes(parameter);
  }
  return offsets;
}

/// A shard size to which the rows of the large parameters fit, when that costs little padding.
int64_t row_step(const std::vector<ParameterShape>& parameters, int64_t shard_bytes) {
  std::vector<const ParameterShape*> by_size;
  for (const auto& parameter : parameters) by_size.push_back(&parameter);
  std::stable_sort(by_size.begin(), by_size.end(), [](auto* a, auto* b) { return bytes(*a) > bytes(*b); });
  int64_t step = kParameterAlignment;
  for (const auto* parameter : by_size) {
    if (parameter->numel() == 0 || is_scalar(*parameter)) continue;
    const int64_t row = row_bytes(*parameter), most = shard_bytes / 128;
    if (row <= most / (step / std::gcd(step, row))) step = std::lcm(step, row);
  }
  return step;
}

/// Puts the 0-dim parameters behind the others, on every rank.
void append_scalars(const std::vector<ParameterShape>& parameters, int ranks, GroupLayout& layout) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!is_scalar(parameters[i])) continue;
    Pieces whole;
    whole.append(ranks, {0, 1, layout.shard_bytes + layout.replicated_bytes}, /*step=*/0);
    layout.parameters[i] = {Replicate{}, std::move(whole), layout.unsharded_bytes};
    layout.replicated_bytes += kParameterAlignment;
    layout.unsharded_bytes += kParameterAlignment;
  }
}

/// So that no count of bytes overflows, of any dtype and with any padding.
void check_size(const std::vector<ParameterShape>& parameters, int ranks) {
  constexpr int64_t kMostElements = int64_t{1} << 56;
  int64_t total = 0;
  for (const auto& parameter : parameters) {
    auto sizes = parameter.sizes;
    if (!sizes.empty()) sizes[0] = at::round_up(std::min(sizes[0], kMostElements + 1), int64_t{ranks});
    uint64_t padded = 0;
    const bool fits = !c10::safe_multiplies_u64(sizes, &padded) && padded <= static_cast<uint64_t>(kMostElements - total);
    TORCH_CHECK_VALUE(fits, "fully_shard: with the parameter ", parameter.name, " of shape ", c10::IntArrayRef(parameter.sizes),
                      " its group has more than 2^56 elements, padded for ", ranks, " ranks");
    total += static_cast<int64_t>(padded);
  }
}

/// The first dim between whose positions it is cut, as all parts of one tensor are.
int64_t cut_dim(const ParameterShape& parameter, const Cut& cut) {
  auto dim = parameter.largest ? static_cast<int64_t>(parameter.largest->last_uneven) : 0;
  while (cut.size > 0 && !cut.falls_between(product(parameter.sizes, static_cast<size_t>(dim) + 1) * item_bytes(parameter)))
    ++dim;
  return dim;
}

/// Calls `visit` (ranks, bytes [low, high) of the whole that the first of them owns) for neighbours that own as much, each after
/// the one before, in the order of the ranks.
template <typename Visit>
void visit_owners(const Cut& cut, int ranks, const Visit& visit) {
  const int64_t offset = cut.offset, size = cut.size, shard_bytes = cut.shard_bytes;
  const auto visit_some = [&](int64_t rank, int64_t count) {
    if (count <= 0) return;
    const int64_t low = std::clamp(rank * shard_bytes, offset, offset + size);
    visit(rank, count, low, std::clamp((rank + 1) * shard_bytes, offset, offset + size));
  };
  // Ranks before the parameter, the first that owns some, those inside, the last, those behind.
  const int64_t begin = std::min<int64_t>(offset / shard_bytes, ranks), last = std::max((offset + size - 1) / shard_bytes, begin);
  const int64_t end = std::min<int64_t>(last + 1, ranks);
  visit_some(0, begin);
  visit_some(begin, std::min<int64_t>(end - begin, 1));
  visit_some(begin + 1, end - begin - 2);
  visit_some(end - 1, end - begin > 1 ? 1 : 0);
  visit_some(end, ranks - end);
}

/// The placement that the cuts of a parameter amount to.
RaggedShard ragged_placement(const ParameterShape& parameter, const Cut& cut, int ranks) {
  RaggedShard placement{cut_dim(parameter, cut), {}};
  const auto behind = static_cast<size_t>(placement.dim) + 1;
  if (cut.size == 0) {
    placement.extents = RankValues{
        std::accumulate(parameter.sizes.begin(), parameter.sizes.begin() + placement.dim + 1, int64_t{1}, std::multiplies<>())};
    placement.extents.append(ranks - 1, 0);
    return placement;
  }
  const int64_t unit_bytes = product(parameter.sizes, behind) * item_bytes(parameter);
  visit_owners(cut, ranks, [&](int64_t, int64_t count, int64_t low, int64_t high) {
    placement.extents.append(count, (high - low) / unit_bytes);
  });
  return placement;
}

/// The pieces of `size` bytes that start at byte `offset`.
Pieces ragged_pieces(const Cut& cut, int64_t item, int ranks) {
  Pieces pieces;
  visit_owners(cut, ranks, [&](int64_t rank, int64_t count, int64_t low, int64_t high) {
    const int64_t numel = (high - low) / item;
    pieces.append(count, {(low - cut.offset) / item, numel, high > low ? low - rank * cut.shard_bytes : 0}, numel);
  });
  return pieces;
}

/// The parameters that a ragged layout has room for.
std::vector<ParameterShape> largest_parts(std::vector<ParameterShape> parameters) {
  for (auto& parameter : parameters) {
    if (parameter.largest) parameter.sizes = parameter.largest->sizes;
  }
  return parameters;
}

} // namespace

int64_t ParameterShape::numel() const { return product(sizes, 0); }

Pieces::Pieces(const std::vector<OwnedRange>& pieces) {
  int64_t step = 0;
  for (size_t rank = 0; rank < pieces.size(); ++rank) {
    if (rank + 1 < pieces.size()) step = pieces[rank + 1].begin - pieces[rank].begin;
    append(1, pieces[rank], step);
  }
}

void Pieces::append(int64_t ranks, const OwnedRange& range, int64_t step) {
  if (ranks <= 0) return;
  const auto first = static_cast<int64_t>(size());
  if (!runs_.empty()) {
    auto& last = runs_.back();
    const bool is_alike = last.range.numel == range.numel && last.range.shard_offset == range.shard_offset && last.step == step;
    if (is_alike && last.range.begin + last.ranks * last.step == range.begin) return void(last.ranks += ranks);
  }
  runs_.push_back({first, ranks, range, step});
}

OwnedRange Pieces::operator[](size_t rank) const {
  const auto index = static_cast<int64_t>(rank);
  const auto after =
      std::upper_bound(runs_.begin(), runs_.end(), index, [](int64_t place, const Run& run) { return place < run.first; });
  const auto& run = *std::prev(after);
  return {run.range.begin + (index - run.first) * run.step, run.range.numel, run.range.shard_offset};
}

std::vector<OwnedRange> Pieces::expanded() const {
  std::vector<OwnedRange> pieces(size());
  for (size_t rank = 0; rank < pieces.size(); ++rank) pieces[rank] = (*this)[rank];
  return pieces;
}

namespace {

/// The places at which the parameters begin, in shards of so many bytes.
struct RaggedPlaces {
  std::vector<int64_t> offsets;
  int64_t shard_bytes = 0;
};

/// The shards begin between rows where that makes them at most 1 % larger.
RaggedPlaces find_places(const std::vector<ParameterShape>& parameters, int ranks) {
  int64_t total = 0;
  for (const auto& parameter : parameters) {
    if (!is_scalar(parameter)) total = at::round_up(total, kParameterAlignment) + bytes(parameter);
  }
  const int64_t equal = std::max(at::round_up(at::ceil_div(total, int64_t{ranks}), kParameterAlignment), kParameterAlignment);
  const int64_t limit = equal + equal / 100;
  const int64_t step = row_step(parameters, equal);

  int64_t end = 0;
  constexpr int64_t kMostAttempts = 64;
  const int64_t stride = at::round_up((limit - equal) / kMostAttempts + 1, step);
  for (int64_t shard = at::round_up(equal, step); shard <= limit; shard += stride) {
    auto offsets = place_ragged(parameters, shard, /*between_rows=*/true, end);
    if (end <= shard * ranks) return {std::move(offsets), shard};
  }
  return {place_ragged(parameters, equal, /*between_rows=*/false, end), equal};
}

} // namespace

GroupLayout plan_ragged(const std::vector<ParameterShape>& own, int ranks) {
  const auto parameters = largest_parts(own);
  const auto places = find_places(parameters, ranks);
  GroupLayout layout;
  layout.shard_bytes = places.shard_bytes;
  layout.unsharded_bytes = places.shard_bytes * ranks;
  for (size_t i = 0; i < parameters.size(); ++i) {
    layout.parameters.emplace_back();
    if (is_scalar(parameters[i])) continue;
    const Cut cut{places.offsets[i], bytes(parameters[i]), layout.shard_bytes};
    layout.parameters[i] = {ragged_placement(parameters[i], cut, ranks),
                            ragged_pieces({cut.offset, bytes(own[i]), cut.shard_bytes}, item_bytes(own[i]), ranks), cut.offset};
  }
  append_scalars(parameters, ranks, layout);
  return layout;
}

namespace {

/// Of a dim of `size`, `chunk` for each rank as long as there are any: begins in steps of `unit`, elements in steps of `row`.
Pieces chunks_of(int64_t size, int64_t chunk, int64_t unit, int64_t row, int ranks, int64_t shard_offset) {
  Pieces pieces;
  const int64_t full = chunk > 0 ? std::min<int64_t>(size / chunk, ranks) : 0;
  pieces.append(full, {0, chunk * row, shard_offset}, chunk * unit);
  const int64_t rest = size - full * chunk;
  if (full < ranks) pieces.append(1, {full * chunk * unit, rest * row, shard_offset}, 0);
  pieces.append(ranks - full - 1, {size * unit, 0, shard_offset}, 0);
  return pieces;
}

} // namespace

GroupLayout plan_per_parameter(const std::vector<ParameterShape>& parameters, int ranks) {
  GroupLayout layout;
  layout.gathers_in_place = ranks == 1;
  layout.is_uniform = true;
  for (const auto& parameter : parameters) {
    ParameterLayout one;
    if (!is_scalar(parameter)) {
      const int64_t rows = parameter.sizes[0], row = product(parameter.sizes, 1), chunk = at::ceil_div(rows, int64_t{ranks});
      one.pieces = chunks_of(rows, chunk, row, row, ranks, layout.shard_bytes);
      one.placement = Shard{0};
      one.unsharded_offset = layout.unsharded_bytes;
      layout.shard_bytes += at::round_up(chunk * row * item_bytes(parameter), kParameterAlignment);
      layout.unsharded_bytes += at::round_up(bytes(parameter), kParameterAlignment);
    }
    layout.parameters.push_back(std::move(one));
  }
  layout.shard_bytes = std::max(layout.shard_bytes, kParameterAlignment);
  layout.unsharded_bytes = std::max(layout.unsharded_bytes, kParameterAlignment);
  append_scalars(parameters, ranks, layout);
  return layout;
}

void check_placement(const ParameterShape& parameter, int ranks) {
  if (!parameter.placement || is_replicate(*parameter.placement)) return;
  const auto check = [&](bool holds, const auto&... problem) {
    TORCH_CHECK_VALUE(holds, "fully_shard: shard_placement_fn gave the parameter ", parameter.name, " of shape ",
                      c10::IntArrayRef(parameter.sizes), " the placement ", to_string(*parameter.placement), problem...);
  };
  const auto dims = static_cast<int64_t>(parameter.sizes.size());
  if (const auto* shard = std::get_if<Shard>(&*parameter.placement)) {
    return check(shard->dim >= -dims && shard->dim < dims, ", but it has ", dims, " dims");
  }
  const auto* ragged = std::get_if<RaggedShard>(&*parameter.placement);
  const bool splits = std::holds_alternative<StridedShard>(*parameter.placement);
  check(ragged, splits ? ", which a group cannot have" : ", which does not split it", ": choose Shard, RaggedShard or Replicate");
  check(ragged->dim >= 0 && ragged->dim < dims, ", but it has ", dims, " dims");
  check(ragged->extents.size() == static_cast<size_t>(ranks), ", which has ", ragged->extents.size(), " extents for ", ranks,
        " ranks");
  const auto first = parameter.sizes.begin();
  const int64_t leading = std::accumulate(first, first + ragged->dim + 1, int64_t{1}, std::multiplies<>());
  int64_t sum = 0;
  for (const auto extent : ragged->extents) {
    check(extent >= 0 && extent <= leading - sum, ", whose extents are not ", leading, " in sum");
    sum += extent;
  }
  check(sum == leading, ", whose extents are not ", leading, " in sum");
}

/// Where the chosen placement of a parameter puts its pieces; their places in the shards are for the caller.
ParameterLayout split_as_placed(const ParameterShape& parameter, int ranks) {
  ParameterLayout layout;
  layout.placement = parameter.placement.value_or(Shard{0});
  if (const auto* ragged = std::get_if<RaggedShard>(&layout.placement)) {
    const int64_t unit = product(parameter.sizes, static_cast<size_t>(ragged->dim) + 1);
    int64_t begin = 0, rank = 0;
    for (const auto& run : ragged->extents.runs()) {
      const int64_t numel = run.value * unit, count = run.end - std::exchange(rank, run.end);
      layout.pieces.append(count, {begin, numel}, numel);
      begin += count * numel;
    }
    return layout;
  }
  auto& dim = std::get<Shard>(layout.placement).dim;
  if (dim < 0) dim += static_cast<int64_t>(parameter.sizes.size());
  layout.split_dim = dim;
  const int64_t size = parameter.sizes[static_cast<size_t>(dim)], chunk = at::ceil_div(size, int64_t{ranks});
  const int64_t rest = size > 0 ? parameter.numel() / size : 0; // elements at one index of the dim
  layout.pieces = chunks_of(size, chunk, dim == 0 ? rest : 1, rest, ranks, /*shard_offset=*/0);
  return layout;
}

GroupLayout plan_placed(const std::vector<ParameterShape>& parameters, int ranks) {
  GroupLayout layout;
  layout.gathers_in_place = ranks == 1;
  std::vector<int64_t> ends(static_cast<size_t>(ranks), 0);
  for (const auto& parameter : parameters) {
    if (is_scalar(parameter)) {
      layout.parameters.emplace_back();
      continue;
    }
    auto one = split_as_placed(parameter, ranks);
    auto pieces = one.pieces.expanded();
    for (size_t rank = 0; rank < ends.size(); ++rank) {
      pieces[rank].shard_offset = ends[rank];
      ends[rank] += at::round_up(pieces[rank].numel * item_bytes(parameter), kParameterAlignment);
    }
    one.pieces = Pieces(pieces);
    one.unsharded_offset = layout.unsharded_bytes;
    layout.unsharded_bytes += at::round_up(bytes(parameter), kParameterAlignment);
    layout.parameters.push_back(std::move(one));
  }
  layout.shard_bytes = std::max(*std::max_element(ends.begin(), ends.end()), kParameterAlignment);
  layout.unsharded_bytes = std::max(layout.unsharded_bytes, kParameterAlignment);
  append_scalars(parameters, ranks, layout);
  return layout;
}

void leave_out(const std::vector<bool>& extended, const std::vector<ParameterShape>& parameters, GroupLayout& layout) {
  layout.gathers_in_place = false;
  std::vector<int64_t> ends(layout.parameters[0].pieces.size(), 0);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (layout.parameters[i].is_replicated()) continue;
    auto pieces = layout.parameters[i].pieces.expanded();
    for (size_t rank = 0; rank < ends.size(); ++rank) {
      pieces[rank].shard_offset = extended[i] ? 0 : ends[rank];
      if (!extended[i]) ends[rank] += at::round_up(pieces[rank].numel * item_bytes(parameters[i]), kParameterAlignment);
    }
    layout.parameters[i].pieces = Pieces(pieces);
  }
  layout.shard_bytes = ends.empty() ? 0 : *std::max_element(ends.begin(), ends.end());
}

at::Tensor owned_part(const at::Tensor& whole, const ParameterLayout& layout, size_t rank) {
  const auto piece = layout.pieces[rank];
  if (layout.split_dim == 0) return whole.reshape({-1}).narrow(0, piece.begin, piece.numel);
  const int64_t size = whole.size(layout.split_dim), rest = whole.numel() > 0 ? whole.numel() / size : 0;
  return whole.narrow(layout.split_dim, piece.begin, rest > 0 ? piece.numel / rest : 0);
}

at::Tensor rows_of(const at::Tensor& whole, const Pieces::Run& run) {
  const auto flat = whole.view({-1});
  const int64_t numel = run.range.numel;
  if (run.step == 0) return flat.narrow(0, run.range.begin, numel).expand({run.ranks, numel}); // every rank has the same
  return flat.narrow(0, run.range.begin, run.ranks * numel).view({run.ranks, numel});
}

std::vector<Stretch> stretches_of(const Pieces& pieces, const RankValues& offsets) {
  std::vector<Stretch> stretches;
  auto offset = offsets.runs().begin();
  for (const auto& run : pieces.runs()) {
    for (int64_t rank = run.first, end = 0; rank < run.first + run.ranks; rank = end) {
      while (offset->end <= rank) ++offset;
      end = std::min(offset->end, run.first + run.ranks);
      if (run.range.numel == 0) continue;
      stretches.push_back({{rank, end - rank, pieces[static_cast<size_t>(rank)], run.step}, offset->value});
    }
  }
  return stretches;
}

PieceCount count_pieces(const GroupLayout& layout) {
  PieceCount pieces;
  for (const auto& parameter : layout.parameters) {
    if (parameter.is_replicated()) continue;
    int64_t ranks = 0;
    for (const auto& run : parameter.pieces.runs()) ranks += run.range.numel > 0 ? run.ranks : 0;
    pieces.count += ranks;
    pieces.are_equal = pieces.are_equal && (ranks == 0 || parameter.pieces.runs().size() == 1);
  }
  return pieces;
}

GroupLayout plan_layout(BufferLayout kind, const std::vector<ParameterShape>& parameters, int ranks) {
  check_size(largest_parts(parameters), ranks);
  const bool is_placed =
      std::any_of(parameters.begin(), parameters.end(), [](const auto& each) { return each.placement.has_value(); });
  if (is_placed) return plan_placed(parameters, ranks);
  return kind == BufferLayout::kRagged ? plan_ragged(parameters, ranks) : plan_per_parameter(parameters, ranks);
}

namespace {

/// The ranks in ranges, [first, end), whose pieces lie at the same places: all own as much of each parameter, or room is left.
std::vector<std::pair<int64_t, int64_t>> alike(const GroupLayout& layout) {
  std::set<int64_t> begins;
  int64_t ranks = 0;
  for (const auto& parameter : layout.parameters) {
    for (const auto& run : parameter.pieces.runs()) begins.insert(layout.is_uniform ? 0 : run.first);
    ranks = static_cast<int64_t>(parameter.pieces.size());
  }
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (auto each = begins.begin(); each != begins.end(); ++each) {
    const auto next = std::next(each);
    ranges.emplace_back(*each, next == begins.end() ? ranks : *next);
  }
  return ranges;
}

} // namespace

ReduceLayout plan_reduce(const GroupLayout& layout, const std::vector<bool>& takes_part) {
  constexpr int64_t kAlignment = 8; // elements: 16 bytes of the narrowest dtype that is reduced, for vector loads
  ReduceLayout reduce;
  reduce.offsets.resize(layout.parameters.size());
  for (const auto& [first, end] : alike(layout)) {
    int64_t offset = 0;
    for (size_t p = 0; p < layout.parameters.size(); ++p) {
      if (!takes_part[p]) continue;
      reduce.offsets[p].append(end - first, offset);
      offset += at::round_up(layout.parameters[p].pieces[static_cast<size_t>(first)].numel, kAlignment);
    }
    reduce.used_offset = std::max(reduce.used_offset, offset);
  }
  reduce.chunk_numel = at::round_up(reduce.used_offset + static_cast<int64_t>(layout.parameters.size()), kAlignment);
  return reduce;
}

} // namespace tessera::internal
