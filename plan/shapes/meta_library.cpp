#include <tessera/plan/shapes/meta_library.h>

#include <ATen/TensorIterator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <string>

namespace tessera::internal::shapes {

MetaLibrary::MetaLibrary(c10::DispatchKey key) : key_(key), library_(torch::Library::IMPL, "aten", key, __FILE__, __LINE__) {}

bool MetaLibrary::lacks(const char* name) const {
  const std::string full = name;
  const auto dot = full.find('.');
  const auto overload = dot == std::string::npos ? std::string() : full.substr(dot + 1);
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::" + full.substr(0, dot), overload});
  return op && !op->hasKernelForDispatchKey(key_);
}

Tensor elementwise(std::initializer_list<Tensor> inputs) {
  at::TensorIteratorConfig config;
  config.add_owned_output(Tensor()).promote_inputs_to_common_dtype(true);
  for (const auto& input : inputs) config.add_owned_const_input(input);
  return config.build().output();
}

Tensor empty_of(const Tensor& like, IntArrayRef sizes) { return at::empty(sizes, like.options()); }
Tensor empty_of(const Tensor& like, IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, like.options().dtype(dtype));
}

Tensor gradient_like(const MaybeTensor& tensor, bool wanted) {
  return wanted && tensor && tensor->defined() ? empty_of(*tensor, tensor->sizes()) : Tensor();
}

} // namespace tessera::internal::shapes
