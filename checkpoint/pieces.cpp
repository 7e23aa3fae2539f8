#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/pieces.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/sharding_math.h>

#include <algorithm>

namespace tessera::checkpoint {

namespace {

void check_has_data(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_meta(), "a meta tensor has no data; allocate it first (tessera::materialize)");
}

std::vector<Piece> pieces_of_local(const at::Tensor& local, std::vector<Box> boxes) {
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

/// Under a StridedShard a rank holds several ranges of a dim: every combination of the dims' ranges is a piece.
std::vector<Piece> pieces_of_ranges(const at::Tensor& local, const Spec& spec) {
  std::vector<Piece> pieces{{whole(spec.sizes()), local}};
  for (int64_t d = 0; d < spec.dim(); ++d) {
    std::vector<Piece> cut;
    for (const auto& piece : pieces) {
      int64_t position = 0;
      for (const auto& range :
           dim_extents(spec.sizes()[d], spec.mesh().shape(), *spec.mesh().coordinate(), spec.placements(), d)) {
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

std::vector<Piece> pieces_of_dtensor(const DTensorMeta& meta) {
  const auto& mesh = meta.spec->mesh();
  if (!mesh.coordinate()) return {};
  check_has_data(meta.local);
  const auto& placements = meta.spec->placements();
  const bool strided = std::any_of(placements.begin(), placements.end(), is_strided);
  if (strided && !meta.spec->ragged() && !meta.spec->has_partial()) return pieces_of_ranges(meta.local, *meta.spec);
  return pieces_of_local(meta.local, local_boxes(meta.spec->sizes(), meta.spec->placements(), mesh.shape(), *mesh.coordinate()));
}

} // namespace

std::vector<Piece> pieces_of(const std::string& name, const at::Tensor& tensor) {
  c10::NoGradGuard no_grad;
  try {
    if (const auto* meta = dtensor_meta(tensor)) return pieces_of_dtensor(*meta);
    check_has_data(tensor);
    TORCH_CHECK(tensor.layout() == at::kStrided, "its layout is ", tensor.layout(), ", not strided");
    if (tensor.numel() == 0) return {};
    return {{whole(tensor.sizes().vec()), tensor.detach()}};
  } catch (const c10::Error& error) {
    C10_THROW_ERROR(Error, c10::str("checkpoint: tensor \"", name, "\": ", error.what_without_backtrace()));
  }
}

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor narrow(const at::Tensor& tensor, const Box& box) {
  auto part = tensor;
  for (size_t d = 0; d < box.sizes.size(); ++d) part = part.narrow(static_cast<int64_t>(d), box.offsets[d], box.sizes[d]);
  return part;
}

std::string layout_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  if (!meta) return "plain";
  std::string shape;
  for (const auto size : meta->spec->mesh().shape()) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  return tessera::to_string(meta->spec->placements()) + " on [" + shape + "]";
}

void mark_written(const at::Tensor& tensor) {
  if (const auto* meta = dtensor_meta(tensor)) meta->local.unsafeGetTensorImpl()->bump_version();
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

} // namespace tessera::checkpoint
