#include "opinfo_calls.h"

#include <torch/torch.h>

#include <fstream>
#include <iterator>

namespace tessera::testing {

namespace {

c10::IValue convert(const c10::IValue& value, const c10::TypePtr& type, std::optional<int32_t> count);

c10::IValue to_list(const c10::IValue& value, const c10::ListType& type, std::optional<int32_t> count) {
  const auto& element = type.getElementType();
  c10::impl::GenericList list(element);
  if (value.isList()) {
    for (const auto& part : value.toListRef()) list.push_back(convert(part, element, std::nullopt));
  } else { // one number for all
    for (int32_t i = 0; i < count.value_or(1); ++i) list.push_back(convert(value, element, std::nullopt));
  }
  return list;
}

c10::IValue to_number(const c10::IValue& value) {
  if (!value.isTuple()) return value;
  const auto& parts = value.toTupleRef().elements();
  return c10::complex<double>(parts[1].toDouble(), parts[2].toDouble());
}

/// What a kernel expects for an argument of `type`.
c10::IValue convert(const c10::IValue& value, const c10::TypePtr& type, std::optional<int32_t> count) {
  if (const auto optional = type->cast<c10::OptionalType>()) {
    if (value.isNone()) return value;
    return convert(value, optional->getElementType(), count);
  }
  switch (type->kind()) {
    case c10::TypeKind::ListType: return to_list(value, type->expectRef<c10::ListType>(), count);
    case c10::TypeKind::FloatType: return value.isInt() ? c10::IValue(static_cast<double>(value.toInt())) : value;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return value.isBool() ? c10::IValue(static_cast<int64_t>(value.toBool())) : value;
    case c10::TypeKind::BoolType: return value.isInt() ? c10::IValue(value.toInt() != 0) : value;
    case c10::TypeKind::NumberType: return to_number(value);
    case c10::TypeKind::DeviceObjType: return value.isString() ? c10::IValue(c10::Device(value.toStringRef())) : value;
    case c10::TypeKind::TensorType: return value.isNone() ? c10::IValue(at::Tensor()) : value;
    default: return value;
  }
}

void collect(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) collect(element, tensors);
  }
}

} // namespace

std::vector<at::Tensor> tensors_of(c10::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) collect(value, tensors);
  return tensors;
}

std::vector<OpCall> load_calls(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  const auto loaded = torch::pickle_load(bytes);
  std::vector<OpCall> calls;
  for (const auto& entry : loaded.toListRef()) {
    const auto pair = entry.toListRef();
    const auto name = pair[0].toStringRef();
    const auto dot = name.rfind('.');
    const auto op = c10::Dispatcher::singleton().findSchema({name.substr(0, dot), name.substr(dot + 1)});
    if (!op) continue;
    OpCall call{*op, {}};
    const auto values = pair[1].toListRef();
    for (size_t i = 0; i < values.size(); ++i) {
      const auto& argument = op->schema().arguments()[i];
      call.arguments.push_back(convert(values[i], argument.type(), argument.N()));
    }
    if (!tensors_of(call.arguments).empty()) calls.push_back(std::move(call));
  }
  return calls;
}

} // namespace tessera::testing
