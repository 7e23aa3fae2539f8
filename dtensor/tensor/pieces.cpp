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

// Under a StridedShard a rank holds several ranges of a dim: every combination of the dims' ranges is a piece.
std::vector<Piece> pieces_of_ranges(const at::Tensor& local, const Spec& spec, const std::vector<int64_t>& coordinate) {
  std::vector<Piece> pieces{{whole(spec.sizes()), local}};
  for (int64_t d = 0; d < spec.dim(); ++d) {
    std::vector<Piece> cut;
    for (const auto& piece : pieces) {
      int64_t position = 0;
      for (const auto& range : dim_extents(spec.sizes()[d], spec.mesh().shape(), coordinate, spec.placements(), d)) {
        cut.push_back({piece.box, piece.data.narrow(d, position, range.size)});
        cut.back().box.offsets[d] = range.offset;
        cut.back().box.sizes[d] = range.size;
        position += range.size;
      }
    }
    pieces = std::move(cut);
  }
  return pieces;
}

} // namespace

std::vector<Piece> pieces_of_part(const at::Tensor& local, const Spec& spec, const std::vector<int64_t>& coordinate) {
  const bool strided = std::ranges::any_of(spec.placements(), is_strided);
  if (strided && !spec.ragged() && !spec.has_partial()) return pieces_of_ranges(local, spec, coordinate);
  return pieces_of_boxes(local, local_boxes(spec.sizes(), spec.placements(), spec.mesh().shape(), coordinate));
}

at::Tensor narrow(const at::Tensor& tensor, const Box& box) {
  auto part = tensor;
  for (size_t d = 0; d < box.sizes.size(); ++d) part = part.narrow(static_cast<int64_t>(d), box.offsets[d], box.sizes[d]);
  return part;
}

} // namespace tessera::internal
