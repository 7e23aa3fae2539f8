#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/boxes/pieces.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

#include <algorithm>

namespace tessera::internal {

namespace {

constexpr size_t kShownMesh = 200; // characters; ranks exchange them for each tensor

template <typename Work>
auto with_name(const std::string& name, const Work& work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    C10_THROW_ERROR(Error, c10::str("checkpoint: tensor \"", name, "\": ", error.what_without_backtrace()));
  }
}

void check_access(const at::Tensor& tensor, Access access) {
  auto* meta = dtensor_meta(tensor);
  if (!meta) return;
  TORCH_CHECK(is_initialized(), "it is a DTensor, and the process group is gone; save and load before destroy_process_group");
  const bool written = access == Access::kWrite;
  const auto* action = written ? "load" : "save";
  meta->check_has_values(action);
  check_copy(tensor, *meta, written, action);
}

void check_has_data(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_meta(), "a meta tensor has no data; allocate it first (tessera::materialize)");
}

std::vector<Piece> pieces_of_dtensor(const DTensorMeta& meta) {
  const auto& mesh = meta.spec->mesh();
  if (!mesh.coordinate()) return {};
  check_has_data(meta.local);
  return pieces_of_part(meta.local, *meta.spec, *mesh.coordinate());
}

} // namespace

void check_access(const std::string& name, const at::Tensor& tensor, Access access) {
  with_name(name, [&] { check_access(tensor, access); });
}

std::vector<Piece> pieces_of(const std::string& name, const at::Tensor& tensor, Access access) {
  c10::NoGradGuard no_grad;
  return with_name(name, [&]() -> std::vector<Piece> {
    check_access(tensor, access);
    if (const auto* meta = dtensor_meta(tensor)) return pieces_of_dtensor(*meta);
    check_has_data(tensor);
    TORCH_CHECK(tensor.layout() == at::kStrided, "its layout is ", tensor.layout(), ", not strided");
    if (tensor.numel() == 0) return {};
    return {{whole(tensor.sizes().vec()), tensor.detach()}};
  });
}

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

bool equal_bytes(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes_of = [](const at::Tensor& tensor) {
    return tensor.resolve_conj().resolve_neg().contiguous().view({-1}).view(at::kByte);
  };
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && at::equal(bytes_of(a), bytes_of(b));
}

std::string layout_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  if (!meta) return "plain";
  std::string shape;
  for (const auto size : meta->spec->mesh().shape()) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  return tessera::to_string(meta->spec->placements()) + " on [" + shape + "]";
}

std::string MeshNames::of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  const auto mesh = meta ? meta->spec->mesh() : DeviceMesh(); // the undefined one stands for plain tensors
  const auto found = std::ranges::find(names_, mesh, &std::pair<DeviceMesh, std::string>::first);
  if (found != names_.end()) return found->second;
  auto text = mesh.defined() ? mesh.to_string() : "";
  if (text.size() > kShownMesh) text = text.substr(0, kShownMesh) + "... #" + to_hex(checksum(text));
  return names_.emplace_back(mesh, std::move(text)).second;
}

void mark_written(const at::Tensor& tensor) {
  const auto count = [](const at::Tensor& written) { // those of InferenceMode count none
    if (!written.is_inference()) written.unsafeGetTensorImpl()->bump_version();
  };
  const auto* meta = dtensor_meta(tensor);
  if (meta) count(meta->local);
  count(tensor);
  if (!meta || tensor.is_inference()) return;
  const c10::NoGradGuard no_grad;
  tensor.copy_(tensor); // copies nothing, but a sharded parameter waits for what still reads its part on another stream
}

} // namespace tessera::internal
