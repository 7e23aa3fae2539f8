#include <tessera/tests/support/simulated_device/outcome.h>

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

namespace tessera::testing::sim {

namespace {

/// Two calls with equal keys have equal outcomes.
class CallKey {
 public:
  explicit CallKey(const Stack& arguments) {
    for (const auto& value : arguments) add(value);
  }
  const std::string& text() const { return text_; }

 private:
  template <typename T>
  void add_bytes(const T& value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  void add_ints(c10::IntArrayRef values) {
    add_bytes(values.size());
    for (const auto value : values) add_bytes(value);
  }

  void add_tensor(const at::Tensor& tensor) {
    add_bytes(tensor.defined());
    if (!tensor.defined()) return;
    add_bytes(tensor.device().type());
    add_bytes(tensor.scalar_type());
    add_bytes(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    add_ints(tensor.sizes());
    add_ints(tensor.strides());
  }

  void add(const IValue& value) {
    text_ += value.tagKind();
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      map_tensors(value, [&](const at::Tensor& tensor) {
        add_tensor(tensor);
        return tensor;
      });
    } else if (value.isInt()) {
      add_bytes(value.toInt());
    } else if (value.isDouble()) {
      add_bytes(value.toDouble());
    } else if (value.isBool()) {
      add_bytes(value.toBool());
    } else if (value.isIntList()) {
      add_ints(value.toIntVector());
    } else if (!value.isNone() && !value.isGenerator()) {
      text_ += c10::str(value);
    }
    text_ += ';';
  }

  std::string text_;
};

std::vector<TensorLayout> layouts_of(const IValue& value) {
  std::vector<TensorLayout> layouts;
  map_tensors(value, [&](const at::Tensor& tensor) {
    layouts.push_back(TensorLayout::of(tensor));
    return tensor;
  });
  return layouts;
}

at::Tensor zeros_like(const at::Tensor& tensor) {
  auto zeros = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  if (const auto bytes = zeros.storage().nbytes(); bytes > 0) std::memset(zeros.mutable_data_ptr(), 0, bytes);
  return zeros;
}

/// Runs it on tensors of the other device type.
Outcome run_on(c10::DeviceType type, const TensorMap& map, const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& traits = OperatorTraits::of(op);
  const auto mapped =
      map_arguments(arguments, type, [&](const at::Tensor& tensor) { return is_on_device(tensor) ? map(tensor) : tensor; });
  Outcome outcome;
  for (const auto& result : call(op, mapped)) outcome.returns.push_back(layouts_of(result));
  for (size_t i = 0; i < mapped.size(); ++i) {
    if (!traits.is_written[i] || !mapped[i].isTensor() || !is_on_device(arguments[i].toTensor())) continue;
    if (mapped[i].toTensor().sizes() != arguments[i].toTensor().sizes())
      outcome.resized.emplace_back(i, TensorLayout::of(mapped[i].toTensor()));
  }
  return outcome;
}

/// The outcomes of one operator.
class OutcomeCache {
 public:
  std::shared_ptr<const Outcome> find(const c10::OperatorHandle& op, const Stack& arguments) {
    const CallKey key(arguments);
    const std::lock_guard lock(mutex_);
    const auto found = outcomes_.find(key.text());
    if (found != outcomes_.end()) return found->second;
    auto outcome = std::make_shared<const Outcome>(infer(op, arguments));
    outcomes_.emplace(key.text(), outcome);
    return outcome;
  }

 private:
  Outcome infer(const c10::OperatorHandle& op, const Stack& arguments) {
    if (has_meta_) {
      try {
        Aliases aliases(c10::kMeta);
        return run_on(
            c10::kMeta, [&](const at::Tensor& tensor) { return aliases.of(tensor); }, op, arguments);
      } catch (const c10::NotImplementedError&) {
        has_meta_ = false;
      }
    }
    try {
      return run_on(c10::kCPU, zeros_like, op, arguments);
    } catch (const c10::Error&) { // it may be the zeros that are wrong
      Outcome unknown;
      unknown.is_known = false;
      return unknown;
    }
  }

  std::mutex mutex_;
  bool has_meta_ = true;
  std::unordered_map<std::string, std::shared_ptr<const Outcome>> outcomes_;
};

} // namespace

TensorLayout TensorLayout::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {false, {}, {}, at::kFloat};
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

at::Tensor TensorLayout::allocate() const {
  if (!is_defined) return {};
  return at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(kDeviceType, 0));
}

std::shared_ptr<const Outcome> Outcome::of(const c10::OperatorHandle& op, const Stack& arguments) {
  static auto* const caches = new PerOperator<OutcomeCache>;
  return caches->of(op, [] { return std::make_unique<OutcomeCache>(); }).find(op, arguments);
}

} // namespace tessera::testing::sim
