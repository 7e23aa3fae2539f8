#include <tessera/plan/meter/dtype_copies.h>

#include <ATen/core/Tensor.h>
#include <absl/container/flat_hash_set.h>
#include <c10/core/Allocator.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <tessera/base/dispatch_keys.h>

namespace tessera::internal {

namespace {

/// The copies of one call.
struct Copies final : at::ObserverContext {
  std::vector<c10::DataPtr> blocks;
};

/// Operators that bring their arguments to a common dtype in front of the kernel. Others that take several, such as `copy_` and
/// `where`, convert as they go, or call `to`.
bool has_common_dtype(std::string_view name) {
  static const auto* const names =
      new absl::flat_hash_set<std::string_view>{"add",     "sub",     "mul", "div", "addcmul", "addcdiv", "pow", "remainder",
                                                "maximum", "minimum", "eq",  "ne",  "lt",      "le",      "gt",  "ge"};
  constexpr std::string_view kLibrary = "aten::";
  if (!name.starts_with(kLibrary)) return false;
  name.remove_prefix(kLibrary.size());
  if (name.ends_with('_')) name.remove_suffix(1);
  return names->contains(name);
}

/// A tensor whose dtype counts for the common one; null for anything else.
const at::Tensor* counted(const c10::IValue& argument) {
  if (!argument.isTensor()) return nullptr;
  const auto& tensor = argument.toTensor();
  if (!tensor.defined() || !tensor.is_meta() || tensor.dim() == 0) return nullptr;
  return &tensor;
}

/// DTensors and parameters that are read have their kernels called with other tensors.
bool is_read(const at::Tensor& tensor) { return tensor.key_set().has(kDTensorKey) || tensor.key_set().has(kTouchKey); }

/// Whether the kernel is called with these arguments, and they are of several dtypes.
bool differ(c10::ArrayRef<const c10::IValue> arguments) {
  std::optional<at::ScalarType> first;
  bool differs = false;
  for (const auto& argument : arguments) {
    const auto* const tensor = counted(argument);
    if (!tensor) continue;
    if (is_read(*tensor)) return false;
    if (!first) first = tensor->scalar_type();
    differs = differs || tensor->scalar_type() != *first;
  }
  return differs;
}

at::ScalarType common_dtype(c10::ArrayRef<const c10::IValue> arguments) {
  std::optional<at::ScalarType> common;
  for (const auto& argument : arguments) {
    const auto* const tensor = counted(argument);
    if (tensor) common = common ? c10::promoteTypes(*common, tensor->scalar_type()) : tensor->scalar_type();
  }
  return common.value_or(at::kFloat);
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& call) {
  const auto arguments = call.inputs();
  if (!differ(arguments) || !has_common_dtype(call.name())) return nullptr;
  const auto common = common_dtype(arguments);
  auto copies = std::make_unique<Copies>();
  const auto copy = [&](const at::Tensor& tensor) {
    const auto bytes = static_cast<size_t>(tensor.numel()) * c10::elementSize(common);
    copies->blocks.push_back(c10::GetAllocator(c10::kMeta)->allocate(bytes));
  };
  for (const auto& argument : arguments) {
    const auto* const tensor = counted(argument);
    if (!tensor || tensor->scalar_type() == common || tensor->numel() <= 1) continue;
    copy(*tensor);
    const bool is_written = &argument == arguments.data() && std::string_view(call.name()).ends_with('_');
    if (is_written) copy(*tensor); // of the result, until it is brought to its dtype
  }
  return copies;
}

void on_end(const at::RecordFunction& /*call*/, at::ObserverContext* context) {
  if (context) static_cast<Copies*>(context)->blocks.clear();
}

} // namespace

DtypeCopies::DtypeCopies()
    : handle_(at::addThreadLocalCallback(
          at::RecordFunctionCallback(on_begin, on_end).needsInputs(true).scopes({at::RecordScope::FUNCTION}))) {}
DtypeCopies::~DtypeCopies() { at::removeCallback(handle_); }

} // namespace tessera::internal
