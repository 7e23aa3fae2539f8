#include <tessera/tests/support/simulated_device/operator_traits.h>

#include <ATen/core/enum_tag.h>

#include <memory>
#include <set>
#include <string>

namespace tessera::testing::sim {

namespace {

bool holds_tensors(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::OptionalType::create(c10::TensorType::get())) ||
         type->isSubtypeOf(*c10::ListType::create(c10::OptionalType::create(c10::TensorType::get()))) ||
         type->isSubtypeOf(*c10::ListType::ofTensors());
}

/// The size of their results depends on values, which no tag tells.
bool is_untagged_synchronous(const std::string& name) {
  static const std::set<std::string> names{"aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::bincount"};
  return names.contains(name);
}

/// Arguments that are written though the schema does not say so: running statistics.
std::set<size_t> unannotated_writes(const std::string& name) {
  if (name == "aten::native_batch_norm") return {3, 4};
  return {};
}

/// Draws that depend on the values of what they write.
bool reads_what_it_writes(const std::string& name) { return name == "aten::rrelu_with_noise_"; }

void read_arguments(const c10::FunctionSchema& schema, OperatorTraits& traits) {
  const auto unannotated = unannotated_writes(schema.name());
  traits.reads_tensors = reads_what_it_writes(schema.name());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool is_written = (argument.alias_info() && argument.alias_info()->isWrite()) || unannotated.contains(i);
    traits.is_written.push_back(is_written);
    if (!is_written && holds_tensors(argument.type())) traits.reads_tensors = true;
  }
}

void read_returns(const c10::FunctionSchema& schema, OperatorTraits& traits) {
  for (const auto& result : schema.returns()) {
    auto& added = traits.returns.emplace_back();
    added.is_list = result.type()->kind() == c10::TypeKind::ListType;
    if (!holds_tensors(result.type())) traits.kind = OperatorTraits::Kind::kSynchronous;
    if (!result.alias_info()) continue;
    if (!result.alias_info()->isWrite()) traits.kind = OperatorTraits::Kind::kView;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* const alias = schema.arguments()[i].alias_info();
      if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) added.argument = i;
    }
  }
}

OperatorTraits read_traits(const c10::OperatorHandle& op) {
  OperatorTraits traits;
  const auto& schema = op.schema();
  if (op.hasTag(at::Tag::nondeterministic_seeded)) traits.kind = OperatorTraits::Kind::kRandom;
  read_arguments(schema, traits);
  read_returns(schema, traits);
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape) ||
      is_untagged_synchronous(schema.name()))
    traits.kind = OperatorTraits::Kind::kSynchronous;
  return traits;
}

} // namespace

const OperatorTraits& OperatorTraits::of(const c10::OperatorHandle& op) {
  static auto* const known = new PerOperator<const OperatorTraits>;
  return known->of(op, [&] { return std::make_unique<const OperatorTraits>(read_traits(op)); });
}

} // namespace tessera::testing::sim
