#include <tessera/fsdp/operator_traits.h>

#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>
#include <absl/container/node_hash_map.h>
#include <absl/strings/match.h>

#include <string_view>

namespace tessera::fsdp_internal {

namespace {

bool is_metadata_only(const std::string& name) {
  static const absl::flat_hash_set<std::string_view> kNames{
      "aten::detach",      "aten::detach_",      "aten::set_data",      "aten::data",         "aten::requires_grad_",
      "aten::retain_grad", "aten::is_leaf",      "aten::output_nr",     "aten::_version",     "aten::size",
      "aten::stride",      "aten::numel",        "aten::dim",           "aten::sym_size",     "aten::sym_stride",
      "aten::sym_numel",   "aten::is_same_size", "aten::is_pinned",     "aten::new_empty",    "aten::new_zeros",
      "aten::new_ones",    "aten::new_full",     "aten::record_stream", "aten::retains_grad", "aten::new_empty_strided"};
  return kNames.contains(name) || absl::EndsWith(name, "_like");
}

bool is_running_statistic(const std::string& argument) {
  static const absl::flat_hash_set<std::string_view> kNames{"running_mean", "running_var", "save_mean", "save_invstd",
                                                            "save_var"};
  return kNames.contains(argument);
}

c10::TypePtr without_optional(const c10::TypePtr& type) {
  const auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

bool is_tensor(const c10::TypePtr& type) { return without_optional(type)->kind() == c10::TypeKind::TensorType; }

bool is_tensor_list(const c10::TypePtr& type) {
  const auto list = without_optional(type)->cast<c10::ListType>();
  return list && is_tensor(list->getElementType());
}

OperatorTraits read_operator(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  OperatorTraits traits{.is_metadata_only = is_metadata_only(name),
                        .converts = name == "aten::to",
                        .replaces_data = name == "aten::_has_compatible_shallow_copy_type",
                        .replaces_storage = name == "aten::set_",
                        .renormalizes = name == "aten::embedding_renorm_"};
  traits.reshapes = op.hasTag(at::Tag::inplace_view) && !traits.is_metadata_only && !traits.replaces_storage;
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    const bool list = is_tensor_list(argument.real_type());
    if (!list && !is_tensor(argument.real_type())) continue;
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    traits.tensors.push_back({i, list, written, is_running_statistic(argument.name())});
  }
  if (!schema.returns().empty()) {
    const auto* alias = schema.returns()[0].alias_info();
    traits.returns_alias = alias && !alias->isWrite();
  }
  return traits;
}

} // namespace

const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  thread_local absl::node_hash_map<const c10::FunctionSchema*, OperatorTraits> known;
  const auto* schema = &op.schema();
  const auto found = known.find(schema);
  return found != known.end() ? found->second : known.emplace(schema, read_operator(op)).first->second;
}

} // namespace tessera::fsdp_internal
