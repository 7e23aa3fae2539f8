#include <tessera/dtensor/rules/rule.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

namespace tessera::internal::rules {

const c10::IValue* OpCall::find(std::string_view argument) const {
  const auto index = schema.argumentIndexWithName(argument);
  return index ? &args[static_cast<size_t>(*index)] : nullptr;
}

int64_t OpCall::integer(std::string_view argument, int64_t otherwise) const {
  const auto* value = find(argument);
  return value && value->isInt() ? value->toInt() : otherwise;
}

bool OpCall::flag(std::string_view argument, bool otherwise) const {
  const auto* value = find(argument);
  return value && value->isBool() ? value->toBool() : otherwise;
}

std::vector<int64_t> OpCall::integers(std::string_view argument) const {
  const auto* value = find(argument);
  if (!value || value->isNone()) return {};
  if (value->isInt()) return {value->toInt()};
  return value->toIntVector();
}

int64_t OpCall::wrap_dim(int64_t dim, int64_t ndim) const {
  const auto bound = std::max<int64_t>(ndim, 1);
  TORCH_CHECK_INDEX(dim >= -bound && dim < bound, name, ": dimension ", dim, " is out of range for a tensor of ", ndim, " dims");
  return dim < 0 ? dim + bound : dim;
}

int64_t OpCall::dim(std::string_view argument, int64_t ndim, int64_t otherwise) const {
  return wrap_dim(integer(argument, otherwise), ndim);
}

std::vector<bool> OpCall::named_dims(std::string_view argument) const {
  const auto ndim = tensors[0].sizes.size();
  std::vector<bool> named(std::max<size_t>(ndim, 1));
  for (const auto dim : integers(argument)) named[wrap_dim(dim, static_cast<int64_t>(ndim))] = true;
  named.resize(ndim);
  return named;
}

size_t OpCall::output_count() const {
  size_t count = 0;
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    count +=
        kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType; // of a list: the element that the rule describes
  }
  return count;
}

size_t LocalCall::begin() const { return stack->size() - op.schema().arguments().size(); }

c10::IValue* LocalCall::find(std::string_view argument) const {
  const auto index = op.schema().argumentIndexWithName(argument);
  return index ? &arg(static_cast<size_t>(*index)) : nullptr;
}

void LocalCall::finish(c10::IValue result) const {
  stack->resize(begin());
  stack->push_back(std::move(result));
}

void LocalCall::finish_out(const at::Tensor& result) const {
  const bool has_out = op.schema().arguments().back().is_out();
  finish(has_out ? stack->back().toTensor().copy_(result) : result);
}

} // namespace tessera::internal::rules
