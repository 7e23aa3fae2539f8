#include <tessera/dtensor/calls/op_info.h>

#include <absl/container/flat_hash_set.h>
#include <absl/strings/match.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>

#include <tessera/dtensor/rules/registry.h>

namespace tessera::internal::dispatch {

namespace {

/// Operators whose result depends on where a tensor's data lies, or that change a tensor's own shape or storage.
bool touches_storage(const c10::OperatorHandle& op) {
  static const absl::flat_hash_set<std::string> names = absl::StrSplit(
      "set_ resize_ resize_as_ _resize_output_ record_stream is_set_to resize_as_sparse_ as_strided as_strided_copy "
      "as_strided_scatter _reshape_from_tensor",
      ' ');
  return op.hasTag(at::Tag::inplace_view) || names.contains(absl::StripPrefix(op.operator_name().name, "aten::"));
}

/// PyTorch's own kernel that runs the operator as others.
std::optional<c10::DispatchKey> composite_kernel(const c10::OperatorHandle& op) {
  for (const auto key : {c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::CompositeExplicitAutograd,
                         c10::DispatchKey::CompositeExplicitAutogradNonFunctional}) {
    if (op.hasKernelForDispatchKey(key)) return key;
  }
  return std::nullopt;
}

/// A rule; else PyTorch's own decomposition; else whole tensors.
void choose_way(const c10::OperatorHandle& op, OpInfo& info) {
  const auto& registry = rules::Registry::instance();
  info.rule = registry.find(op);
  if (std::get_if<rules::Decompose>(info.rule)) info.decomposition = composite_kernel(op);
  if (info.rule || touches_storage(op)) return;
  const bool composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  if (!composite && op.hasTag(at::Tag::pointwise) && !op.hasTag(at::Tag::nondeterministic_seeded)) {
    info.rule = &registry.pointwise();
    return;
  }
  const bool backend = op.hasKernelForDispatchKey(c10::DispatchKey::CPU); // the composite kernel writes into a plain tensor
  if (!backend) info.decomposition = composite_kernel(op);
  if (info.decomposition) return;
  info.rule = &registry.whole();
  info.replicates = true;
}

OpInfo make_info(const c10::OperatorHandle& op) {
  OpInfo info{read_schema(op.schema())};
  info.name = c10::toString(op.operator_name());
  choose_way(op, info);
  const auto& base = op.operator_name().name;
  info.reads_no_value = absl::EndsWith(base, "_like") || absl::StartsWith(base, "aten::new_");
  info.is_backward = info.name.find("_backward") != std::string::npos;
  info.infers_shapes = op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  info.plan_depends_on_caller = info.writes;
  const auto* on_locals = std::get_if<rules::OnLocals>(info.rule);
  const bool static_numbers = on_locals && on_locals->traits.contains(rules::Trait::kStaticScalars);
  for (auto& argument : info.arguments) {
    info.plan_depends_on_caller |= argument.kind == ArgKind::kTensorList;
    if (argument.kind == ArgKind::kNumber && static_numbers) argument.kind = ArgKind::kStatic;
  }
  return info;
}

} // namespace

const OpInfo& op_info(const c10::OperatorHandle& op) { return read_once<&make_info>(op); }

} // namespace tessera::internal::dispatch
