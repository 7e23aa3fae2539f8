#include <tessera/dtensor/distribute_module.h>

#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

namespace {

void distribute(const std::string& name, const at::Tensor& tensor, const DeviceMesh& mesh, const PlaceParameter& place) {
  if (!tensor.defined() || is_dtensor(tensor)) return;
  const auto placements = place ? place(name, tensor) : Placements(mesh.ndim());
  try {
    const at::NoGradGuard no_grad;
    const auto whole = distribute_tensor(tensor.detach(), mesh, placements);
    auto* meta = dtensor_meta(whole);
    become_dtensor(tensor, c10::make_intrusive<DTensorMeta>(meta->local, meta->spec));
    tensor.mutable_grad().reset();
  } catch (c10::Error& error) {
    error.add_context("distribute_module: parameter '" + name + "'");
    throw;
  }
}

} // namespace

} // namespace tessera::internal

namespace tessera {

void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PlaceParameter& place) {
  for (const auto& item : module.named_parameters()) internal::distribute(item.key(), item.value(), mesh, place);
  for (const auto& item : module.named_buffers()) internal::distribute(item.key(), item.value(), mesh, place);
}

} // namespace tessera
