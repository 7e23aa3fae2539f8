#include <tessera/tests/support/simulated_device/operators.h>

#include <tessera/tests/support/simulated_device/boxed.h>
#include <tessera/tests/support/simulated_device/caching_allocator.h>
#include <tessera/tests/support/simulated_device/composites.h>
#include <tessera/tests/support/simulated_device/hooks.h>
#include <tessera/tests/support/simulated_device/run_operator.h>
#include <tessera/tests/support/simulated_device/runtime.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <optional>
#include <utility>

namespace tessera::testing::sim {

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &CachingAllocator::get(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &CachingAllocator::get(), kKeys, c10::dtype_or_default(dtype));
}

/// One copy between two memories, of which the host's may be pinned.
void launch_copy(const char* name, const at::Tensor& from, const at::Tensor& to) {
  auto& runtime = Runtime::get();
  const auto source = from.is_cpu() ? from : Aliases(c10::kCPU).of(from);
  const auto destination = to.is_cpu() ? to : Aliases(c10::kCPU).of(to);
  runtime.launch(current_stream(), {name,
                                    {{Region::of(from), false}, {Region::of(to), true}},
                                    [source, destination] { destination.copy_(source); },
                                    runtime.time_line().work_us(name)});
}

/// The host waits for a copy from or to its memory, but for one that need not block, with pinned memory. Another source of the
/// host is read at once.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto from = self.expand(to.sizes());
  if (is_on_device(from) && is_on_device(to)) {
    launch_copy("aten::copy_", from, to);
  } else if (is_on_device(to)) {
    if (!from.is_pinned()) from = from.clone();
    launch_copy("copy to the device", from, to);
    if (!non_blocking) Runtime::get().synchronize(current_stream(), "copy to the device");
  } else {
    launch_copy("copy to the host", from, to);
    if (!non_blocking || !to.is_pinned()) Runtime::get().synchronize(current_stream(), "copy to the host");
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, /*non_blocking=*/false);
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  auto& allocator = CachingAllocator::get();
  const c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, /*resizable=*/true);
  return at::native::set_storage_cpu_(self, storage, 0, {0}, {});
}

/// Asked by `set_data`, and with it `Module::to`: a parameter of the CPU may become one of the device.
bool may_become(const at::Tensor& self, const at::Tensor& other) {
  return self.layout() == at::kStrided && other.layout() == at::kStrided;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  CachingAllocator::get().record_stream(self.storage().data(), static_cast<size_t>(stream.id()));
}

void register_memory(torch::Library& library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(at::native::view));
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_", set_to_nothing);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("record_stream", record_stream);
  library.impl("_has_compatible_shallow_copy_type", may_become);
}

/// Operators whose composite kernels would come before the fallback, and compute otherwise than the CPU, or in more launches than
/// CUDA.
void register_composites(torch::Library& library, torch::Library& autograd) {
  library.impl("native_dropout", native_dropout);
  for (auto* const each : {&library, &autograd}) {
    each->impl("_thnn_fused_gru_cell", gru_cell);
    each->impl("_thnn_fused_lstm_cell", lstm_cell);
  }
  for (const char* const name : {"convolution", "convolution_backward", "native_layer_norm", "native_group_norm", "_chunk_cat",
                                 "_chunk_cat.out", "split_with_sizes_copy", "split_with_sizes_copy.out"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("aten::_foreach_") || name.overload_name.ends_with("out")) continue;
    const auto own = name.name.substr(std::string("aten::").size());
    library.impl((name.overload_name.empty() ? own : own + "." + name.overload_name).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&run_foreach_operator>());
  }
}

} // namespace

void register_operators() {
  using Kind = torch::Library::Kind;
  constexpr auto kKey = c10::DispatchKey::PrivateUse1;
  // They end with the process: the dispatcher may be used until then.
  static auto* const all = new torch::Library(Kind::IMPL, "_", kKey, __FILE__, __LINE__);
  static auto* const library = new torch::Library(Kind::IMPL, "aten", kKey, __FILE__, __LINE__);
  static auto* const autograd = new torch::Library(Kind::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  all->fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  // A copy resolves these itself, as on every device. What comes in front of an operator would copy, and without an end.
  static auto* const conjugate = new torch::Library(Kind::IMPL, "aten", c10::DispatchKey::Conjugate, __FILE__, __LINE__);
  static auto* const negative = new torch::Library(Kind::IMPL, "aten", c10::DispatchKey::Negative, __FILE__, __LINE__);
  for (auto* const each : {conjugate, negative}) each->impl("_copy_from", torch::CppFunction::makeFallthrough());
  register_memory(*library);
  register_composites(*library, *autograd);
}

} // namespace tessera::testing::sim
