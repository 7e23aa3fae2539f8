#include <tessera/parallel/stages/value_tree.h>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <c10/util/Exception.h>

#include <bit>
#include <utility>

namespace tessera::internal::pipeline {

namespace {

// The structure: T a tensor, I an int, B a bool, D a double, N None, s<length>:<text> a string, (…) a tuple, [T…] a list of
// tensors,
// [*…] of anything, {T<string><value>…} a dict of tensors, {*…} of anything. Lists of ints and doubles are [I…] and [D…].

class ValueWriter {
 public:
  ValueWriter(FlatValue& flat, const std::string& what) : flat_(flat), what_(what) {}

  void write(const c10::IValue& value) {
    auto& text = flat_.structure;
    if (value.isTensor()) {
      text += 'T';
      flat_.tensors.push_back(value.toTensor());
    } else if (value.isInt()) {
      number('I', value.toInt());
    } else if (value.isBool()) {
      number('B', value.toBool() ? 1 : 0);
    } else if (value.isDouble()) {
      number('D', std::bit_cast<int64_t>(value.toDouble()));
    } else if (value.isNone()) {
      text += 'N';
    } else if (value.isString()) {
      string(value.toStringRef());
    } else {
      write_container(value);
    }
  }

 private:
  void write_container(const c10::IValue& value) {
    auto& text = flat_.structure;
    if (value.isTuple()) {
      text += '(';
      for (const auto& each : value.toTupleRef().elements()) write(each);
      text += ')';
    } else if (value.isList()) {
      const auto list = value.toListRef();
      text += '[';
      text += value.isTensorList() ? 'T' : value.isIntList() ? 'I' : value.isDoubleList() ? 'D' : '*';
      for (const auto& each : list) write(each);
      text += ']';
    } else if (value.isGenericDict()) {
      const auto dict = value.toGenericDict();
      text += '{';
      text += *dict.valueType() == *c10::TensorType::get() ? 'T' : '*';
      for (const auto& item : dict) {
        TORCH_CHECK(item.key().isString(), what_, " has a dict whose keys are no strings but ", item.key().tagKind());
        string(item.key().toStringRef());
        write(item.value());
      }
      text += '}';
    } else {
      TORCH_CHECK(false, what_, " has a ", value.tagKind(),
                  " in it; tensors, ints, doubles, bools, strings, None, and lists, tuples and dicts of these can go through a "
                  "pipeline");
    }
  }
  void number(char kind, int64_t value) {
    flat_.structure += kind;
    flat_.numbers.push_back(value);
  }
  void string(const std::string& text) { flat_.structure += "s" + std::to_string(text.size()) + ":" + text; }

  FlatValue& flat_;
  const std::string& what_;
};

class ValueReader {
 public:
  explicit ValueReader(const FlatValue& flat) : flat_(flat) {}

  c10::IValue read() {
    const auto& text = flat_.structure;
    TORCH_INTERNAL_ASSERT(at_ < text.size());
    switch (text[at_++]) {
      case 'T': return flat_.tensors.at(next_tensor_++);
      case 'I': return flat_.numbers.at(next_number_++);
      case 'B': return flat_.numbers.at(next_number_++) != 0;
      case 'D': return std::bit_cast<double>(flat_.numbers.at(next_number_++));
      case 'N': return {};
      case 's': return string();
      case '(': return tuple();
      case '[': return list();
      case '{': return dict();
      default: TORCH_INTERNAL_ASSERT(false, "the structure ", text, " of a pipeline's message cannot be read at ", at_ - 1);
    }
  }

 private:
  bool ends_with(char end) {
    const bool ends = flat_.structure.at(at_) == end;
    at_ += ends ? 1 : 0;
    return ends;
  }
  std::string string() {
    size_t length = 0;
    while (flat_.structure.at(at_) != ':') length = 10 * length + static_cast<size_t>(flat_.structure[at_++] - '0');
    auto text = flat_.structure.substr(++at_, length);
    at_ += length;
    return text;
  }
  c10::IValue tuple() {
    std::vector<c10::IValue> elements;
    while (!ends_with(')')) elements.push_back(read());
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  c10::IValue list() {
    const char kind = flat_.structure.at(at_++);
    const auto type = kind == 'T'   ? c10::TypePtr(c10::TensorType::get())
                      : kind == 'I' ? c10::TypePtr(c10::IntType::get())
                      : kind == 'D' ? c10::TypePtr(c10::FloatType::get())
                                    : c10::TypePtr(c10::AnyType::get());
    c10::impl::GenericList list(type);
    while (!ends_with(']')) list.push_back(read());
    return list;
  }
  c10::IValue dict() {
    const char kind = flat_.structure.at(at_++);
    const auto type = kind == 'T' ? c10::TypePtr(c10::TensorType::get()) : c10::TypePtr(c10::AnyType::get());
    c10::impl::GenericDict dict(c10::StringType::get(), type);
    while (!ends_with('}')) {
      auto key = read();
      dict.insert(std::move(key), read());
    }
    return dict;
  }

  const FlatValue& flat_;
  size_t at_ = 0, next_tensor_ = 0, next_number_ = 0;
};

} // namespace

FlatValue flatten(const c10::IValue& value, const std::string& what) {
  FlatValue flat;
  ValueWriter(flat, what).write(value);
  return flat;
}

c10::IValue unflatten(const FlatValue& flat) { return ValueReader(flat).read(); }

std::vector<at::Tensor> tensors_of(const c10::IValue& value) { return flatten(value, "a value").tensors; }

c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& other) {
  auto flat = flatten(value, "a value");
  for (auto& tensor : flat.tensors) tensor = other(tensor);
  return unflatten(flat);
}

} // namespace tessera::internal::pipeline
