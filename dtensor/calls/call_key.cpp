#include <tessera/dtensor/calls/call_key.h>

#include <bit>
#include <cstring>
#include <string_view>

#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

namespace {

// The first word of each argument; spec ids count up from 1 and stay below 2^56.
enum Tag : uint64_t { kNone = 1, kScalarTensor, kList, kInt, kDouble, kBool, kString, kDevice, kNumberKind };
constexpr uint64_t tag(Tag value, uint64_t extra = 0) { return (static_cast<uint64_t>(value) << 56) | extra; }

KeyState add_tensor(const c10::IValue& value, CallKey& key) {
  if (!value.isTensor() || !value.toTensor().defined()) {
    key.push_back(tag(kNone));
  } else if (const auto* meta = dtensor_meta(value.toTensor())) {
    key.push_back(meta->spec->id());
  } else if (value.toTensor().dim() > 0) {
    return KeyState::kPlainTensor;
  } else {
    const auto& number = value.toTensor();
    const uint64_t wrapped = number.unsafeGetTensorImpl()->is_wrapped_number() ? 1 : 0;
    key.push_back(tag(kScalarTensor, (wrapped << 8) | static_cast<uint64_t>(number.scalar_type())));
  }
  return KeyState::kComplete;
}

/// What a number tells of the results' dtypes.
enum class NumberKind : uint8_t { kNone, kBool, kInt, kDouble, kComplex };

NumberKind kind_of(const c10::IValue& value) {
  if (value.isDouble()) return NumberKind::kDouble;
  if (value.isInt()) return NumberKind::kInt;
  if (value.isBool()) return NumberKind::kBool;
  if (value.isComplexDouble()) return NumberKind::kComplex;
  return NumberKind::kNone;
}

void add_number(const c10::IValue& value, CallKey& key) {
  if (C10_LIKELY(!value.isList())) return key.push_back(tag(kNumberKind, static_cast<uint64_t>(kind_of(value))));
  const auto list = value.toListRef();
  key.push_back(tag(kList, list.size()));
  for (const auto& element : list) add_number(element, key);
}

void add_text(std::string_view text, CallKey& key) {
  key.push_back(tag(kString, text.size()));
  for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
    key.push_back(word);
  }
}

KeyState add_value(const c10::IValue& value, CallKey& key) {
  if (value.isNone()) {
    key.push_back(tag(kNone));
  } else if (value.isInt()) {
    key.insert(key.end(), {tag(kInt), static_cast<uint64_t>(value.toInt())});
  } else if (value.isBool()) {
    key.push_back(tag(kBool, value.toBool()));
  } else if (value.isDouble()) {
    key.insert(key.end(), {tag(kDouble), std::bit_cast<uint64_t>(value.toDouble())});
  } else if (value.isDevice()) {
    const auto device = value.toDevice();
    key.push_back(tag(kDevice, (static_cast<uint64_t>(device.type()) << 16) | static_cast<uint16_t>(device.index())));
  } else if (value.isString()) {
    add_text(value.toStringView(), key);
  } else if (value.isList()) {
    const auto list = value.toListRef();
    key.push_back(tag(kList, list.size()));
    for (const auto& element : list) {
      if (add_value(element, key) != KeyState::kComplete) return KeyState::kUncacheable;
    }
  } else {
    return KeyState::kUncacheable;
  }
  return KeyState::kComplete;
}

} // namespace

KeyState make_key(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, CallKey& key) {
  key.push_back(reinterpret_cast<uintptr_t>(&info));
  auto state = KeyState::kComplete;
  for (size_t i = 0; i < info.arguments.size() && state == KeyState::kComplete; ++i) {
    const auto& value = arguments[i];
    switch (info.arguments[i].kind) {
      case ArgKind::kDynamic: break;
      case ArgKind::kNumber: add_number(value, key); break;
      case ArgKind::kStatic: state = add_value(value, key); break;
      case ArgKind::kTensor: state = add_tensor(value, key); break;
      case ArgKind::kTensorList: {
        if (value.isNone()) {
          key.push_back(tag(kNone));
          break;
        }
        const auto list = value.toListRef();
        key.reserve(key.size() + list.size() + 2);
        key.push_back(tag(kList, list.size()));
        for (size_t k = 0; k < list.size() && state == KeyState::kComplete; ++k) state = add_tensor(list[k], key);
      }
    }
  }
  return state;
}

} // namespace tessera::internal::dispatch
