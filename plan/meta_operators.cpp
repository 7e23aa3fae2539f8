#include <tessera/plan/meta_operators.h>

#include <c10/util/Exception.h>

#include <tessera/base/meta_device.h>
#include <tessera/plan/shapes/meta_library.h>

namespace tessera {

namespace {

using internal::shapes::MetaLibrary;

const MetaLibrary* registered_kernels() {
  auto* const library = new MetaLibrary(c10::DispatchKey::Meta); // for as long as the dispatcher lives
  for (auto* const add : {internal::shapes::add_element_wise, internal::shapes::add_norms, internal::shapes::add_attention,
                          internal::shapes::add_convolutions, internal::shapes::add_pools, internal::shapes::add_activations,
                          internal::shapes::add_losses, internal::shapes::add_indexing, internal::shapes::add_products,
                          internal::shapes::add_reductions, internal::shapes::add_optimizers})
    add(*library);
  for (const auto key : {c10::DispatchKey::AutogradMeta, c10::DispatchKey::AutogradCPU}) { // the latter for DTensors
    auto* const autograd = new MetaLibrary(key);
    for (auto* const add : {internal::shapes::add_choice_of_attention, internal::shapes::add_choice_of_dropout,
                            internal::shapes::add_choice_of_norms})
      add(*autograd);
  }
  return library;
}

} // namespace

void register_meta_operators() { [[maybe_unused]] static const auto* const once = registered_kernels(); }

MetaOperatorsOf::MetaOperatorsOf(c10::DeviceType device) : before_(internal::device_behind_meta()) {
  TORCH_CHECK_VALUE(device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA,
                    "MetaOperatorsOf: operators of the meta device stand for those of the CPU or of CUDA, not of ",
                    c10::DeviceTypeName(device));
  internal::device_behind_meta() = device;
}
MetaOperatorsOf::~MetaOperatorsOf() { internal::device_behind_meta() = before_; }

} // namespace tessera
