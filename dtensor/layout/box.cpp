#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <tessera/dtensor/layout/box.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>

namespace tessera::internal {

namespace {

// [begin, end) of the flattened dims `level`..`dim` of `box`, whose dims before `level` are already narrowed.
void append_range(Box box, size_t level, size_t dim, int64_t begin, int64_t end, std::vector<Box>& out) {
  if (begin >= end) return;
  const auto inner = c10::multiply_integers(box.sizes.begin() + level + 1, box.sizes.begin() + dim + 1);
  const auto rows = [&](int64_t first, int64_t last) {
    Box narrowed = box;
    narrowed.offsets[level] += first;
    narrowed.sizes[level] = last - first;
    return narrowed;
  };
  auto first = begin / inner;
  if (begin % inner != 0) {
    const auto row_end = std::min(end, (first + 1) * inner);
    append_range(rows(first, first + 1), level + 1, dim, begin - first * inner, row_end - first * inner, out);
    ++first;
  }
  const auto last = end / inner;
  if (first < last) out.push_back(rows(first, last));
  if (first <= last && end % inner != 0) append_range(rows(last, last + 1), level + 1, dim, 0, end - last * inner, out);
}

// A rank's part while the placements are applied: a box, of whose flattened dims 0..dim perhaps only a range is held.
struct Part {
  Box box;
  std::vector<int64_t> largest; // the sizes of the first rank's box, which is the largest
  std::optional<int64_t> ragged_dim;
  int64_t begin = 0, end = 0;

  void apply(const Shard& shard, int64_t ranks, int64_t index) {
    const auto ndim = static_cast<int64_t>(box.sizes.size());
    const auto dim = shard.dim < 0 ? shard.dim + ndim : shard.dim;
    TORCH_CHECK(dim >= 0 && dim < ndim, "Shard(", shard.dim, ") of a tensor with ", ndim, " dims");
    const bool within_range = ragged_dim && dim <= *ragged_dim;
    TORCH_CHECK(!within_range || *ragged_dim == 0, "Shard(", dim, ") after RaggedShard(", ragged_dim.value_or(0),
                ") cannot be described as boxes");
    const auto n = within_range ? end - begin : box.sizes[dim];
    const auto chunk = (n + ranks - 1) / ranks;
    const auto low = std::min(n, chunk * index), high = std::min(n, low + chunk);
    if (within_range) {
      end = begin + high;
      begin += low;
    } else {
      box.offsets[dim] += low;
      box.sizes[dim] = high - low;
      largest[dim] = (largest[dim] + ranks - 1) / ranks;
    }
  }

  void apply(const RaggedShard& ragged, int64_t ranks, int64_t index) {
    TORCH_CHECK(ragged.dim >= 0 && ragged.dim < static_cast<int64_t>(box.sizes.size()), "RaggedShard(", ragged.dim,
                ") of a tensor with ", box.sizes.size(), " dims");
    TORCH_CHECK(static_cast<int64_t>(ragged.extents.size()) == ranks, "RaggedShard with ", ragged.extents.size(),
                " extents on a mesh dim of ", ranks, " ranks");
    TORCH_CHECK(!ragged_dim || *ragged_dim == ragged.dim, "RaggedShard(", ragged.dim, ") after RaggedShard(",
                ragged_dim.value_or(0), ") cannot be described as boxes");
    const auto n = ragged_dim ? end - begin : c10::numelements_to_dim(static_cast<int>(ragged.dim + 1), box.sizes);
    const auto total = ragged.extents.sum_before(ragged.extents.size());
    const auto most = ragged_dim ? n : c10::numelements_to_dim(static_cast<int>(ragged.dim + 1), largest);
    TORCH_CHECK(total == most, "the extents of RaggedShard(", ragged.dim, ") add up to ", total, " where the tensor has ", most);
    const auto low = std::min(n, ragged.extents.sum_before(static_cast<size_t>(index)));
    ragged_dim = ragged.dim;
    end = begin + std::min(n, low + ragged.extents[index]);
    begin += low;
  }

  void apply(const StridedShard& strided, int64_t, int64_t) {
    TORCH_CHECK(false, "StridedShard(", strided.dim, ", ", strided.split_factor,
                ") cannot be described as boxes; redistribute it first");
  }

  void apply(const Replicate&, int64_t, int64_t) {}

  void apply(const Partial&, int64_t, int64_t) {
    TORCH_CHECK(false, "a tensor with placement Partial has no value of its own; redistribute it first");
  }
};

// The dim in which the boxes start at the most places.
size_t most_cut_dim(const std::vector<const Box*>& boxes) {
  size_t most = 0, dim = 0;
  for (size_t d = 0; d < boxes[0]->sizes.size(); ++d) {
    std::unordered_set<int64_t> starts;
    for (const auto* box : boxes) starts.insert(box->offsets[d]);
    if (starts.size() > most) {
      most = starts.size();
      dim = d;
    }
  }
  return dim;
}

bool overlap(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.offsets[d] >= b.offsets[d] + b.sizes[d] || b.offsets[d] >= a.offsets[d] + a.sizes[d]) return false;
  }
  return true;
}

} // namespace

int64_t Box::numel() const {
  // Sizes come from files too: beside a 0, the others may be too large to multiply.
  return std::ranges::find(sizes, 0) != sizes.end() ? 0 : c10::multiply_integers(sizes);
}

Box whole(const std::vector<int64_t>& sizes) { return {std::vector<int64_t>(sizes.size(), 0), sizes}; }

std::optional<Box> intersect(const Box& a, const Box& b) {
  TORCH_INTERNAL_ASSERT(a.sizes.size() == b.sizes.size());
  Box common = a;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    const auto low = std::max(a.offsets[d], b.offsets[d]);
    const auto high = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (low >= high) return std::nullopt;
    common.offsets[d] = low;
    common.sizes[d] = high - low;
  }
  return common;
}

std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<const Box*>& boxes) {
  std::vector<size_t> order; // of the boxes that hold something
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (boxes[i]->numel() > 0) order.push_back(i);
  }
  if (order.size() < 2) return std::nullopt;
  if (boxes[0]->sizes.empty()) return std::pair(order[0], order[1]);
  // Sorted by their start in one dim, boxes can only meet until the first one that starts after their end.
  const auto dim = most_cut_dim(boxes);
  const auto start = [&](size_t i) { return boxes[i]->offsets[dim]; };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return start(a) < start(b); });
  for (auto a = order.begin(); a != order.end(); ++a) {
    const auto end = start(*a) + boxes[*a]->sizes[dim];
    for (auto b = a + 1; b != order.end() && start(*b) < end; ++b) {
      if (overlap(*boxes[*a], *boxes[*b])) return std::minmax(*a, *b);
    }
  }
  return std::nullopt;
}

std::optional<int64_t> checked_bytes(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  if (std::ranges::find(sizes, 0) != sizes.end()) return 0;
  for (const auto size : sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return bytes;
}

bool fits(const Box& inner, const std::vector<int64_t>& sizes) {
  if (inner.sizes.size() != sizes.size() || inner.offsets.size() != sizes.size()) return false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (inner.offsets[d] < 0 || inner.sizes[d] < 0 || inner.sizes[d] > sizes[d] || inner.offsets[d] > sizes[d] - inner.sizes[d]) {
      return false;
    }
  }
  return true;
}

std::vector<Box> split(const Box& box, int64_t item, int64_t bytes) {
  const auto total = box.numel() * item;
  if (total == 0) return {};
  const auto dim = std::ranges::find_if(box.sizes, [](int64_t size) { return size > 1; }) - box.sizes.begin();
  if (total <= bytes || dim == std::ssize(box.sizes)) return {box};
  const auto rows = std::max<int64_t>(1, bytes / (total / box.sizes[dim]));
  std::vector<Box> boxes;
  for (int64_t row = 0; row < box.sizes[dim]; row += rows) {
    boxes.push_back(box);
    boxes.back().offsets[dim] += row;
    boxes.back().sizes[dim] = std::min(rows, box.sizes[dim] - row);
  }
  return boxes;
}

std::string to_string(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(box.offsets[d]) + ":" + std::to_string(box.offsets[d] + box.sizes[d]);
  }
  return text + "]";
}

std::vector<Box> boxes_of_range(const Box& box, int64_t dim, int64_t begin, int64_t end) {
  std::vector<Box> boxes;
  if (box.numel() > 0) append_range(box, 0, static_cast<size_t>(dim), begin, end, boxes);
  return boxes;
}

std::vector<Box> local_boxes(const std::vector<int64_t>& sizes, const Placements& placements,
                             const std::vector<int64_t>& mesh_shape, const std::vector<int64_t>& coordinate) {
  TORCH_CHECK(placements.size() == mesh_shape.size() && coordinate.size() == mesh_shape.size(), placements.size(),
              " placements on a mesh of ", mesh_shape.size(), " dims");
  Part part{whole(sizes), sizes};
  for (size_t d = 0; d < mesh_shape.size(); ++d) {
    std::visit([&](const auto& placement) { part.apply(placement, mesh_shape[d], coordinate[d]); }, placements[d]);
  }
  if (part.ragged_dim) return boxes_of_range(part.box, *part.ragged_dim, part.begin, part.end);
  return part.box.numel() > 0 ? std::vector<Box>{part.box} : std::vector<Box>{};
}

} // namespace tessera::internal
