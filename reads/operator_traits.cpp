#include <tessera/reads/operator_traits.h>

#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>

#include <absl/container/flat_hash_set.h>
#include <absl/strings/match.h>

#include <string_view>

namespace tessera::internal {

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

/// Running statistics, and what a copy on a registered device fills.
bool is_written_undeclared(const std::string& name, const std::string& argument) {
  static const absl::flat_hash_set<std::string_view> kNames{"running_mean", "running_var", "save_mean", "save_invstd",
                                                            "save_var"};
  return kNames.contains(argument) || (argument == "dst" && absl::StartsWith(name, "aten::_copy_from"));
}

bool is_argument_returned(const std::string& name) {
  static const absl::flat_hash_set<std::string_view> kNames{"aten::type_as",    "aten::broadcast_tensors", "aten::meshgrid",
                                                            "aten::atleast_1d", "aten::atleast_2d",        "aten::atleast_3d"};
  return kNames.contains(name);
}

Special special_of(const c10::OperatorHandle& op, bool is_metadata_only) {
  const auto& name = op.schema().name();
  if (name == "aten::to") return Special::kConverts;
  if (name == "aten::_has_compatible_shallow_copy_type") return Special::kReplacesData;
  if (name == "aten::set_") return Special::kReplacesStorage;
  if (name == "aten::embedding_renorm_") return Special::kRenormalizes;
  return op.hasTag(at::Tag::inplace_view) && !is_metadata_only ? Special::kReshapes : Special::kNone;
}

OperatorTraits read_operator(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  OperatorTraits traits{dispatch::read_schema(schema)};
  traits.is_metadata_only = is_metadata_only(name);
  traits.special = special_of(op, traits.is_metadata_only);
  traits.returns_alias = !traits.returns.empty() && traits.returns[0].view;
  traits.returns_argument = is_argument_returned(name);
  traits.is_composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  for (size_t i = 0; i < traits.arguments.size(); ++i) {
    const auto& argument = schema.arguments()[i].name();
    if (argument == "storage_offset") traits.storage_offset = i;
    if (is_written_undeclared(name, argument)) traits.written_undeclared.push_back(i);
    traits.writes_at_indices |= argument == "indices" && traits.arguments[0].written;
  }
  return traits;
}

} // namespace

const OperatorTraits& traits_of(const c10::OperatorHandle& op) { return dispatch::read_once<&read_operator>(op); }

} // namespace tessera::internal
