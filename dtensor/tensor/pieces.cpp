#include <c10/util/Exception.h>
#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/tensor/pieces.h>

#include <algorithm>
#include <utility>

namespace tessera::internal {

namespace {

std::vector<Piece> pieces_of_boxes(const at::Tensor& local, std::vector<Box> boxes) {
  if (boxes.size() == 1 && local.sizes() == at::IntArrayRef(boxes[0].sizes)) return {{std::move(boxes[0]), local}};
  std::vector<Piece> pieces;
  const auto flat = boxes.empty() ? at::Tensor() : local.view({-1});
  int64_t position = 0;
  for (auto& box : boxes) {
    const auto numel = box.numel();
    auto data = flat.narrow(0, position, numel).view(box.sizes);
    pieces.push_back({std::move(box), std::move(data)});
    position += numel;
  }
  TORCH_CHECK(position == local.numel(), "the local tensor has ", local.numel(), " elements where its placement gives ",
              position);
  return pieces;
}

/// `piece` whose dim `d` counts positions of the ranges `held`, taken one after another: what it is of each.
void cut_by_ranges(const Piece& piece, size_t d, const std::vector<Extent>& held, std::vector<Piece>& cut) {
  const auto begin = piece.box.offsets[d], end = begin + piece.box.sizes[d];
  int64_t before = 0;
  for (const auto& range : held) {
    const auto low = std::max(begin, before), high = std::min(end, before + range.size);
    if (low < high) {
      cut.push_back({piece.box, piece.data.narrow(static_cast<int64_t>(d), low - begin, high - low)});
      cut.back().box.offsets[d] = range.offset + low - before;
      cut.back().box.sizes[d] = high - low;
    }
    before += range.size;
  }
}

// Under a StridedShard a rank holds several ranges of a dim: every combination of the dims' ranges is a piece. Under a
// RaggedShard besides, these ranges are what it takes a range of.
std::vector<Piece> pieces_of_ranges(const at::Tensor& local, const Spec& spec, const std::vector<int64_t>& coordinate) {
  std::vector<std::vector<Extent>> held;
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < spec.dim(); ++d) {
    held.push_back(dim_extents(spec.sizes()[d], spec.mesh().shape(), coordinate, spec.placements(), d));
    sizes.push_back(0);
    for (const auto& range : held.back()) sizes.back() += range.size;
  }
  std::vector<Piece> pieces{{whole(sizes), local}};
  if (const auto mesh_dim = ragged_mesh_dim(spec.placements())) {
    const auto& ragged = std::get<RaggedShard>(spec.placements()[*mesh_dim]);
    const auto part = ragged_extent(cut_at(ragged, sizes), coordinate[*mesh_dim]);
    pieces = pieces_of_boxes(local, boxes_of_range(whole(sizes), ragged.dim, part.offset, part.offset + part.size));
  }
  for (size_t d = 0; d < sizes.size(); ++d) {
    std::vector<Piece> cut;
    for (const auto& piece : pieces) cut_by_ranges(piece, d, held[d], cut);
    pieces = std::move(cut);
  }
  return pieces;
}

} // namespace

std::vector<Piece> pieces_of_part(const at::Tensor& local, const Spec& spec, const std::vector<int64_t>& coordinate) {
  const bool strided = std::ranges::any_of(spec.placements(), is_strided);
  if (strided && !spec.has_partial()) return pieces_of_ranges(local, spec, coordinate);
  return pieces_of_boxes(local, local_boxes(spec.sizes(), spec.placements(), spec.mesh().shape(), coordinate));
}

at::Tensor narrow(const at::Tensor& tensor, const Box& box) {
  auto part = tensor;
  for (size_t d = 0; d < box.sizes.size(); ++d) part = part.narrow(static_cast<int64_t>(d), box.offsets[d], box.sizes[d]);
  return part;
}

} // namespace tessera::internal
