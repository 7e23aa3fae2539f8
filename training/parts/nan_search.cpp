#include <tessera/training/parts/nan_search.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <absl/container/flat_hash_set.h>
#include <c10/util/StringUtil.h>

#include <string_view>
#include <utility>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/in_backward.h>

namespace tessera::internal {

namespace {

/// Returns memory that nobody has written, or fills it: under deterministic algorithms, kernels fill what they allocate with NaN.
bool only_allocates(std::string_view name) {
  return name.starts_with("aten::empty") || name.starts_with("aten::new_empty") || name == "aten::resize_" ||
         name == "aten::resize_as_" || name == "aten::_resize_output_" || name == "aten::set_" || name == "aten::fill_";
}

/// Operators whose written argument need not have been written before.
bool overwrites(std::string_view name, const c10::Argument& argument) {
  static const absl::flat_hash_set<std::string_view> names{
      "aten::copy_",      "aten::_foreach_copy_", "aten::zero_",     "aten::_foreach_zero_", "aten::fill_",
      "aten::normal_",    "aten::uniform_",       "aten::random_",   "aten::cauchy_",        "aten::log_normal_",
      "aten::geometric_", "aten::exponential_",   "aten::bernoulli_"};
  return argument.kwarg_only() || names.contains(name);
}

/// Whole buffers are cast, with what lies between the parameters.
bool casts(std::string_view name) { return name == "aten::to" || name == "aten::_to_copy"; }

ValueTraits traits_of_schema(const c10::FunctionSchema& schema) {
  ValueTraits traits;
  traits.returns_values = !only_allocates(schema.name());
  traits.casts = casts(schema.name());
  for (const auto& value : schema.returns()) {
    if (value.alias_info() != nullptr && !value.alias_info()->isWrite()) traits.returns_values = false;
  }
  for (const auto& argument : schema.arguments()) {
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    traits.is_written.push_back(is_written);
    traits.is_only_written.push_back(!traits.returns_values || (is_written && overwrites(schema.name(), argument)));
  }
  return traits;
}

template <typename Function>
bool any_tensor(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (!value.isTensorList()) return false;
  bool found = false;
  for (const auto& tensor : value.toTensorVector()) found = found || function(tensor);
  return found;
}

bool has_values(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex()) && !tensor.is_meta() &&
         tensor.layout() == at::kStrided && tensor.has_storage() && tensor.numel() > 0 && !is_dtensor(tensor);
}

} // namespace

NanSearch::NanSearch(const torch::nn::Module& model, bool infinities) : infinities_(infinities) {
  for (const auto& parameter : model.named_parameters()) {
    const auto dot = parameter.key().rfind('.');
    index_.emplace(parameter.value().unsafeGetTensorImpl(), static_cast<int>(modules_.size()));
    modules_.push_back(dot == std::string::npos ? model.name() : parameter.key().substr(0, dot));
    parameters_.push_back(parameter.value()); // no other tensor gets its address
  }
}

std::optional<NanSearch::Finding> NanSearch::take() {
  const std::lock_guard lock(mutex_);
  positions_.clear();
  operators_ = 0;
  return std::exchange(finding_, std::nullopt);
}

bool NanSearch::is_bad(const c10::IValue& value) const {
  return any_tensor(value, [&](const at::Tensor& tensor) {
    if (!has_values(tensor)) return false;
    return infinities_ ? !at::isfinite(tensor).all().item<bool>() : at::isnan(tensor).any().item<bool>();
  });
}

const ValueTraits& NanSearch::traits_of(const at::RecordFunction& function) {
  static const ValueTraits none{false, false, {}, {}};
  const auto name = function.operator_name();
  if (!name) return none;
  if (const auto known = traits_.find(*name); known != traits_.end()) return known->second;
  const auto handle = c10::Dispatcher::singleton().findSchema(*name);
  return traits_.emplace(*name, handle ? traits_of_schema(handle->schema()) : none).first->second;
}

std::string NanSearch::place_of(const ModulePosition& position) const {
  const auto module = [&](int index) { return c10::str("module '", modules_[static_cast<size_t>(index)], "'"); };
  const bool in_hook = position.node.name.empty();
  if (in_hook && !in_backward()) {
    if (position.last_read < 0) return "in forward, before a module read a parameter";
    return c10::str("in forward, ", position.depth > 0 ? "in " : "after ", module(position.last_read));
  }
  const auto& node = in_hook ? position.last_node : position.node;
  if (node.name.empty()) return "in backward, in a hook before the first node";
  const auto text = c10::str("in backward, in ", in_hook ? "a hook after " : "", node.name);
  return node.read < 0 ? text : c10::str(text, " of ", module(node.read), " or of what comes after it");
}

void NanSearch::found(const at::RecordFunction& function, const char* what, const ModulePosition& position) {
  finding_ =
      Finding{operators_, c10::str(function.name(), " ", what, infinities_ ? " NaN or infinity " : " NaN ", place_of(position))};
}

void NanSearch::begin_node(const at::RecordFunction& node, ModulePosition& position, Begun& begun) {
  begun.outer_node = std::exchange(position.node, BackwardNode{node.name()});
  const auto forward = positions_.find(node.forwardThreadId());
  if (forward == positions_.end()) return;
  const auto after = forward->second.reads.upper_bound(node.seqNr());
  if (after != forward->second.reads.begin()) position.node.read = std::prev(after)->second;
}

void NanSearch::begin_operator(const at::RecordFunction& function, ModulePosition& position, Begun& begun) {
  ++operators_;
  if (!in_backward()) position.last_node = {};
  const auto inputs = function.inputs();
  for (const auto& input : inputs) {
    any_tensor(input, [&](const at::Tensor& tensor) {
      const auto read = index_.find(tensor.unsafeGetTensorImpl());
      if (read == index_.end()) return false;
      if (position.last_read != read->second && function.seqNr() >= 0) position.reads[function.seqNr()] = read->second;
      position.last_read = read->second;
      return begun.reads_parameter = true;
    });
  }
  if (begun.reads_parameter) ++position.depth;
  const auto& traits = traits_of(function);
  for (size_t i = 0; i < inputs.size() && i < traits.is_only_written.size(); ++i) {
    // An operator makes its output with others that work in place, and take no values from it: addmv_ with a factor of 0.
    const bool is_output = traits.is_only_written[i] || (traits.is_written[i] && position.calls > 0);
    if (is_output || position.casts > 0 || !is_bad(inputs[i])) continue;
    if (!traits.casts) return found(function, "got", position);
    begun.had_it = true;
  }
  begun.is_call = true;
  ++position.calls;
  position.casts += traits.casts ? 1 : 0;
}

std::unique_ptr<NanSearch::Begun> NanSearch::begin(const at::RecordFunction& function) {
  auto begun = std::make_unique<Begun>();
  const std::lock_guard lock(mutex_);
  if (finding_) return begun;
  auto& position = positions_[at::RecordFunction::currentThreadId()];
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    begin_node(function, position, *begun);
  } else {
    begin_operator(function, position, *begun);
  }
  return begun;
}

void NanSearch::end(const at::RecordFunction& function, const Begun& begun) {
  const std::lock_guard lock(mutex_);
  if (finding_) return;
  auto& position = positions_[at::RecordFunction::currentThreadId()];
  if (begun.outer_node) position.last_node = std::exchange(position.node, *begun.outer_node);
  if (function.scope() != at::RecordScope::FUNCTION) return;
  const auto& traits = traits_of(function);
  if (begun.is_call) {
    --position.calls;
    position.casts -= traits.casts ? 1 : 0;
  }
  if (traits.returns_values && !begun.had_it && position.casts == 0) {
    for (const auto& output : function.outputs()) {
      if (is_bad(output)) return found(function, "made", position);
    }
  }
  if (begun.reads_parameter) --position.depth;
}

} // namespace tessera::internal
