#include "emulated_policy.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <span>
#include <string>
#include <utility>

namespace tessera::testing::scripts {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local EmulatedPolicy::Scope* current_scope = nullptr;

std::set<EmulatedPolicy*>& all_policies() {
  static std::set<EmulatedPolicy*> all;
  return all;
}

/// The mean of the ranks' gradients, in the order of the ranks. A sum of numbers in half precision is rounded once.
Tensor reduced(const variable_list& gradients, c10::ScalarType dtype) {
  Tensor sum;
  for (const auto& gradient : gradients) {
    if (!gradient.defined()) continue; // this rank has not used it
    const auto rounded = gradient.is_complex() ? gradient : gradient.to(dtype);
    const auto wide = rounded.to(c10::promoteTypes(rounded.scalar_type(), torch::kFloat));
    sum = sum.defined() ? sum + wide : wide;
  }
  if (!sum.defined()) return sum;
  const auto mean = sum / static_cast<double>(gradients.size());
  return mean.is_complex() ? mean : mean.to(dtype);
}

/// The largest element of the mean of the gradients' absolute values: what they may cancel to is rounded relative to that.
double size_of(const variable_list& gradients) {
  Tensor sum;
  for (const auto& gradient : gradients) {
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const auto size = (gradient.is_complex() ? gradient.abs() : gradient.to(torch::kDouble).abs()).detach();
    sum = sum.defined() ? sum + size : size;
  }
  const double size = sum.defined() ? sum.max().item<double>() / static_cast<double>(gradients.size()) : 0;
  return std::isfinite(size) ? size : 0; // of a loss that overflows
}

/// From a parameter to what each rank reads of it: values that are filled in elsewhere.
struct ReadByRanks : torch::autograd::Function<ReadByRanks> {
  static variable_list forward(AutogradContext* context, const Tensor& parameter, const std::vector<Tensor>* values,
                               c10::ScalarType reduce_dtype, const Tensor& size) {
    context->set_materialize_grads(false);
    context->saved_data["own"] = parameter.scalar_type();
    context->saved_data["reduce"] = reduce_dtype;
    context->saved_data["size"] = size;
    const auto& version = torch::autograd::impl::version_counter(parameter);
    variable_list reads;
    for (const auto& each : *values) // a write to the parameter is one to what was read
      reads.emplace_back(each.unsafeGetTensorImpl()->shallow_copy_and_detach(version, /*allow_tensor_metadata_change=*/true));
    return reads;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto own = context->saved_data["own"].toScalarType();
    context->saved_data["size"].toTensor().data().add_(size_of(gradients));
    const auto mean = gradients.size() == 1 ? gradients[0] : reduced(gradients, context->saved_data["reduce"].toScalarType());
    return {mean.defined() ? mean.to(own) : mean, Tensor(), Tensor(), Tensor()};
  }
};

/// The value of `x`, whose gradient is that of the result times `factor`.
struct GradientTimes : torch::autograd::Function<GradientTimes> {
  static Tensor forward(AutogradContext* context, const Tensor& x, double factor) {
    context->saved_data["factor"] = factor;
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0] * context->saved_data["factor"].toDouble(), Tensor()};
  }
};

/// Calls `visit` for each tensor in `value`, which takes what it has become where that returns true.
template <typename Visit>
void visit_tensors(c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    Tensor tensor = value.toTensor();
    if (tensor.defined() && visit(tensor)) value = tensor;
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      c10::IValue each = list.get(i);
      if (each.isTensor()) visit_tensors(each, visit);
      list.set(i, each);
    }
    value = list;
  }
}

/// Puts what is read in the place of parameters among `arguments`. Returns the dtype of the first one.
std::optional<c10::ScalarType> read_parameters(const EmulatedPolicy::Scope& scope, std::span<c10::IValue> arguments) {
  std::optional<c10::ScalarType> dtype;
  for (auto& argument : arguments) {
    visit_tensors(argument, [&](Tensor& tensor) {
      const auto read = scope.read(tensor);
      if (read.defined()) tensor = read;
      if (!dtype && tensor.is_floating_point() && scope.is_read(tensor)) dtype = tensor.scalar_type();
      return read.defined();
    });
  }
  return dtype;
}

/// Casts what is no parameter, and is not written.
void cast_activations(const EmulatedPolicy::Scope& scope, const c10::FunctionSchema& schema, std::span<c10::IValue> arguments,
                      c10::ScalarType dtype) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite()) continue;
    visit_tensors(arguments[i], [&](Tensor& tensor) {
      const bool casts = tensor.is_floating_point() && tensor.scalar_type() != dtype && tensor.dim() > 0;
      if (!casts || scope.is_read(tensor)) return false;
      tensor = tensor.to(dtype);
      return true;
    });
  }
}

/// `ones_like` and others read no element, so that they make constants of the parameter's own dtype. Without grad mode, a number
/// is that of the shard.
bool reads_in_policy(const c10::FunctionSchema& schema) {
  const bool is_number = schema.name() == "aten::item" || schema.name() == "aten::_local_scalar_dense";
  return !schema.name().ends_with("_like") && (!is_number || torch::GradMode::is_enabled());
}

/// An operator that reads a parameter casts its other floating-point inputs to the dtype of what it reads. Those that it is made
/// of do so too, and those of a backward within the forward, as of a gradient penalty, do not: they read what was saved.
void on_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& scope = *current_scope;
  if (scope.is_in_forward() && reads_in_policy(op.schema())) {
    const c10::impl::ExcludeDispatchKeyGuard below(kMode);
    const auto arguments = std::span(*stack).last(op.schema().arguments().size());
    const auto dtype = read_parameters(scope, arguments);
    if (dtype && scope.casts_activations()) cast_activations(scope, op.schema(), arguments, *dtype);
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kMode), stack);
}

} // namespace

bool is_kept(const torch::nn::Module& model, const std::string& name, const std::vector<std::string>& entries) {
  return std::any_of(entries.begin(), entries.end(), [&](const std::string& entry) {
    if (name == entry || name.ends_with('.' + entry)) return true;
    const auto modules = model.named_modules();
    return std::any_of(modules.begin(), modules.end(), [&](const auto& item) {
      return item.value()->name().ends_with("::" + entry + "Impl") && name.starts_with(item.key() + '.');
    });
  });
}

EmulatedPolicy::EmulatedPolicy(MixedPrecisionPolicy policy, int64_t ranks) : policy_(std::move(policy)), ranks_(ranks) {
  all_policies().insert(this);
}

EmulatedPolicy::~EmulatedPolicy() { all_policies().erase(this); }

void EmulatedPolicy::note_parameters(const torch::nn::Module& model) {
  const c10::InferenceMode normal(false);
  const torch::NoGradGuard no_grad;
  const auto parameters = model.named_parameters();
  for (const auto& item : parameters) {
    const auto& parameter = item.value();
    auto& reading = readings_[parameter.unsafeGetTensorImpl()];
    if (reading.parameter.defined()) continue;
    reading.parameter = parameter;
    reading.start = parameter.detach().clone();
    reading.size = torch::zeros({}, torch::kDouble);
    auto dtype = parameter.scalar_type();
    const auto names_it = [&](const auto& other) {
      return other.value().is_same(parameter) && is_kept(model, other.key(), policy_.keep_in_fp32);
    };
    const bool kept = std::any_of(parameters.begin(), parameters.end(), names_it);
    if (parameter.is_floating_point() && policy_.param_dtype) dtype = kept ? torch::kFloat : *policy_.param_dtype;
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      reading.values.push_back(parameter.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true));
      storages_.insert(reading.values.back().storage().unsafeGetStorageImpl());
    }
  }
}

void EmulatedPolicy::track(Reading& reading) const {
  const auto dtype = reading.values[0].scalar_type();
  reading.tracked = ReadByRanks::apply(reading.parameter, &reading.values, policy_.reduce_dtype.value_or(dtype), reading.size);
}

void EmulatedPolicy::refresh() {
  const c10::InferenceMode normal(false);
  const torch::NoGradGuard no_grad;
  for (auto& [impl, reading] : readings_) {
    has_moved_ = has_moved_ || !reading.parameter.equal(reading.start);
    for (auto& value : reading.values) value.copy_(reading.parameter.detach());
  }
}

void EmulatedPolicy::begin() {
  const c10::InferenceMode normal(false);
  const torch::NoGradGuard no_grad;
  has_moved_ = false;
  for (auto& [impl, reading] : readings_) {
    reading.start = reading.parameter.detach().clone();
    reading.size.zero_();
  }
}

std::optional<double> EmulatedPolicy::size_of_gradients(const Tensor& parameter) const {
  const auto found = readings_.find(parameter.unsafeGetTensorImpl());
  if (has_moved_ || found == readings_.end()) return std::nullopt;
  return found->second.size.item<double>();
}

void EmulatedPolicy::refresh_all() {
  for (auto* policy : all_policies()) policy->refresh();
}

Tensor EmulatedPolicy::mean(const std::vector<Tensor>& losses) {
  const auto ranks = static_cast<double>(losses.size());
  Tensor sum = torch::zeros({});
  for (const auto& loss : losses) sum = sum + GradientTimes::apply(loss.to(torch::kDouble), ranks);
  return sum / ranks;
}

EmulatedPolicy::Scope::Scope(EmulatedPolicy& policy, const torch::nn::Module& model, int64_t rank)
    : policy_(policy),
      rank_(rank),
      outer_(current_scope),
      task_(torch::autograd::get_current_graph_task_id()),
      caches_casts_(at::autocast::is_autocast_cache_enabled()),
      mode_(kMode) {
  at::autocast::set_autocast_cache_enabled(false); // each operator casts a parameter anew
  const c10::impl::ExcludeDispatchKeyGuard below(kMode);
  policy_.note_parameters(model);
  policy_.refresh();
  current_scope = this;
}

EmulatedPolicy::Scope::~Scope() {
  at::autocast::set_autocast_cache_enabled(caches_casts_);
  current_scope = outer_;
}

Tensor EmulatedPolicy::Scope::read(const Tensor& tensor) const {
  const auto found = policy_.readings_.find(tensor.unsafeGetTensorImpl());
  if (found == policy_.readings_.end()) return {};
  auto& reading = found->second;
  const auto rank = static_cast<size_t>(rank_);
  const bool trains = tensor.requires_grad() && torch::GradMode::is_enabled();
  if (trains && reading.tracked.empty()) policy_.track(reading);
  if (trains) return reading.tracked[rank];
  const auto& version = torch::autograd::impl::version_counter(tensor);
  return Tensor(reading.values[rank].unsafeGetTensorImpl()->shallow_copy_and_detach(version, true));
}

bool EmulatedPolicy::Scope::is_in_forward() const { return torch::autograd::get_current_graph_task_id() == task_; }

bool EmulatedPolicy::Scope::is_read(const Tensor& tensor) const {
  return tensor.has_storage() && policy_.storages_.count(tensor.storage().unsafeGetStorageImpl()) > 0;
}

// Above autograd and autocast, as what casts in a forward is.
TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_operator>()); }

} // namespace tessera::testing::scripts
