#include <tessera/dtensor/calls/call_schema.h>

#include <ATen/core/jit_type.h>

namespace tessera::internal::dispatch {

namespace {

c10::TypePtr without_optional(const c10::TypePtr& type) {
  const auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

ArgKind kind_of(const c10::Argument& argument) {
  auto type = without_optional(argument.type());
  const auto list = type->cast<c10::ListType>();
  if (list) type = without_optional(list->getElementType());
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return list ? ArgKind::kTensorList : ArgKind::kTensor;
    case c10::TypeKind::NumberType:
    case c10::TypeKind::FloatType: return ArgKind::kNumber;
    case c10::TypeKind::GeneratorType: return list ? ArgKind::kStatic : ArgKind::kDynamic;
    default: return ArgKind::kStatic;
  }
}

/// The argument that a return with `alias` is.
int written_argument(const c10::FunctionSchema& schema, const c10::AliasInfo& alias) {
  int found = -1;
  for (size_t i = 0; alias.isWrite() && i < schema.arguments().size(); ++i) {
    const auto* source = schema.arguments()[i].alias_info();
    if (source && source->isWrite() && source->beforeSets() == alias.beforeSets()) found = static_cast<int>(i);
  }
  return found;
}

} // namespace

CallSchema read_schema(const c10::FunctionSchema& schema) {
  CallSchema result;
  for (const auto& argument : schema.arguments()) {
    const auto kind = kind_of(argument);
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (kind == ArgKind::kTensor || kind == ArgKind::kTensorList) result.tensors.push_back(result.arguments.size());
    result.arguments.push_back({kind, written, written && argument.is_out()});
    result.writes |= written;
    const bool names_places = kind == ArgKind::kTensor && (argument.name() == "index" || argument.name() == "mask");
    result.writes_places |= names_places && result.arguments[0].written;
  }
  for (const auto& value : schema.returns()) {
    const auto* alias = value.alias_info();
    result.returns.push_back({alias ? written_argument(schema, *alias) : -1, alias && !alias->isWrite()});
    result.views |= result.returns.back().view;
    result.returns_list |= value.type()->kind() == c10::TypeKind::ListType;
  }
  return result;
}

} // namespace tessera::internal::dispatch
