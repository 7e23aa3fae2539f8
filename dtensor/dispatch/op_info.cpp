#include <tessera/dtensor/dispatch/op_info.h>

#include <ATen/core/jit_type.h>
#include <absl/container/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string_view>

#include <tessera/dtensor/rules/registry.h>

namespace tessera::dispatch {

namespace {

ArgKind kind_of(const c10::Argument& argument, const rules::Rule* rule) {
  auto type = argument.type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return ArgKind::kTensor;
    case c10::TypeKind::ListType: {
      auto element = type->castRaw<c10::ListType>()->getElementType();
      if (const auto optional = element->cast<c10::OptionalType>()) element = optional->getElementType();
      if (element->kind() == c10::TypeKind::TensorType) return ArgKind::kTensorList;
      const bool number = element->kind() == c10::TypeKind::NumberType || element->kind() == c10::TypeKind::FloatType;
      return number && !(rule && rule->static_scalars) ? ArgKind::kDynamic : ArgKind::kStatic;
    }
    case c10::TypeKind::NumberType:
    case c10::TypeKind::FloatType: return rule && rule->static_scalars ? ArgKind::kStatic : ArgKind::kDynamic;
    case c10::TypeKind::GeneratorType: return ArgKind::kDynamic;
    default: return ArgKind::kStatic;
  }
}

/// Operators whose result depends on where a tensor's data lies, or that change a tensor's own shape or storage.
bool touches_storage(const c10::OperatorHandle& op) {
  static const std::array<std::string_view, 11> names{"aten::set_",
                                                      "aten::resize_",
                                                      "aten::resize_as_",
                                                      "aten::_resize_output_",
                                                      "aten::record_stream",
                                                      "aten::is_set_to",
                                                      "aten::resize_as_sparse_",
                                                      "aten::as_strided",
                                                      "aten::as_strided_copy",
                                                      "aten::as_strided_scatter",
                                                      "aten::_reshape_from_tensor"};
  return op.hasTag(at::Tag::inplace_view) || std::find(names.begin(), names.end(), op.operator_name().name) != names.end();
}

/// A rule; else PyTorch's own decomposition; else whole tensors.
void choose_way(const c10::OperatorHandle& op, OpInfo& info) {
  const auto& registry = rules::Registry::instance();
  info.rule = registry.find(op.operator_name());
  if (info.rule || touches_storage(op)) return;
  const bool composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  if (!composite && op.hasTag(at::Tag::pointwise) && !op.hasTag(at::Tag::nondeterministic_seeded)) {
    info.rule = &registry.pointwise();
    return;
  }
  for (const auto key : {c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::CompositeExplicitAutograd,
                         c10::DispatchKey::CompositeExplicitAutogradNonFunctional}) {
    const bool backend = op.hasKernelForDispatchKey(c10::DispatchKey::CPU); // the composite kernel writes into a plain tensor
    if (!op.hasKernelForDispatchKey(key) || backend) continue;
    info.decomposition = key;
    return;
  }
  info.rule = &registry.whole();
  info.replicates = true;
}

OpInfo make_info(const c10::OperatorHandle& op) {
  OpInfo info;
  info.name = c10::toString(op.operator_name());
  choose_way(op, info);
  info.infers_shapes = op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  const auto& schema = op.schema();
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    OpInfo::Argument entry{kind_of(argument, info.rule)};
    entry.written = alias && alias->isWrite();
    entry.out = entry.written && argument.is_out();
    info.writes |= entry.written;
    info.arguments.push_back(entry);
  }
  for (const auto& result : schema.returns()) {
    OpInfo::Return entry;
    const auto* alias = result.alias_info();
    entry.view = alias && !alias->isWrite();
    for (size_t i = 0; alias && alias->isWrite() && i < info.arguments.size(); ++i) {
      const auto* source = schema.arguments()[i].alias_info();
      if (source && source->isWrite() && source->beforeSets() == alias->beforeSets())
        entry.written_argument = static_cast<int>(i);
    }
    info.views |= entry.view;
    info.returns.push_back(entry);
  }
  info.backward_matters = info.writes;
  for (const auto& argument : info.arguments) info.backward_matters |= argument.kind == ArgKind::kTensorList;
  return info;
}

} // namespace

const OpInfo& op_info(const c10::OperatorHandle& op) {
  // Schemas live as long as their operator; a second level without a lock keeps the hot path short.
  thread_local absl::flat_hash_map<const c10::FunctionSchema*, const OpInfo*> known;
  auto& entry = known[&op.schema()];
  if (!entry) {
    static std::mutex mutex;
    static auto* all = new absl::flat_hash_map<const c10::FunctionSchema*, std::unique_ptr<const OpInfo>>;
    std::lock_guard lock(mutex);
    auto& shared = (*all)[&op.schema()];
    if (!shared) shared = std::make_unique<const OpInfo>(make_info(op));
    entry = shared.get();
  }
  return *entry;
}

} // namespace tessera::dispatch
