#include <tessera/collectives/backends/simulated/traffic.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <string>
#include <string_view>

#include <tessera/base/dispatch_keys.h>

namespace tessera::internal {

namespace {

/// Their schemas do not say that they leave the elements where they are.
bool is_known_view(std::string_view name) {
  static const auto* const names = new absl::flat_hash_set<std::string_view>{
      "aten::_unsafe_view",   "aten::_reshape_alias", "aten::lift_fresh", "aten::set_",         "aten::resize_",
      "aten::requires_grad_", "aten::detach_",        "aten::item",       "aten::record_stream"};
  return names->contains(name);
}

bool only_allocates(std::string_view name) {
  return name.starts_with("aten::empty") || name.starts_with("aten::new_empty") || name == "aten::_efficientzerotensor";
}

/// They write all of their first argument, and read none of it.
bool overwrites(std::string_view name) {
  static const auto* const names = new absl::flat_hash_set<std::string_view>{
      "aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_"};
  return names->contains(name);
}

bool picks(std::string_view name) {
  static const auto* const names =
      new absl::flat_hash_set<std::string_view>{"aten::embedding", "aten::index_select", "aten::index", "aten::gather"};
  return names->contains(name);
}

OperatorTraffic traffic_of(const c10::FunctionSchema& schema) {
  const std::string_view name = schema.name();
  const auto is_view = [](const c10::Argument& result) { return result.alias_info() && !result.alias_info()->isWrite(); };
  const auto is_new = [](const c10::Argument& result) { return !result.alias_info(); };
  OperatorTraffic traffic;
  const auto &arguments = schema.arguments(), &results = schema.returns();
  const bool gives_views = std::any_of(results.begin(), results.end(), is_view);
  traffic.moves = !gives_views && !is_known_view(name) && !only_allocates(name);
  traffic.returns = std::any_of(results.begin(), results.end(), is_new);
  traffic.picks = picks(name);
  for (size_t i = 0; i < std::min<size_t>(arguments.size(), 64); ++i) {
    const auto* const alias = arguments[i].alias_info();
    const bool is_written = alias && alias->isWrite(),
               is_output = is_written && (arguments[i].is_out() || (i == 0 && overwrites(name)));
    if (is_written) traffic.written |= uint64_t{1} << i;
    if (!is_output) traffic.read |= uint64_t{1} << i;
  }
  return traffic;
}

double bytes_in(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return 0;
  const auto keys = tensor.key_set();
  if (keys.has(kDTensorKey) && !keys.has(kTouchKey)) return 0;
  return std::min(static_cast<double>(tensor.nbytes()), static_cast<double>(tensor.storage().nbytes()));
}

} // namespace

const OperatorTraffic& KnownTraffic::of(const at::RecordFunction& call) {
  auto& found = known_[call.name()];
  if (!found) {
    const auto schema = call.operator_schema();
    found = std::make_unique<OperatorTraffic>(schema ? traffic_of(*schema) : OperatorTraffic());
  }
  return *found;
}

double bytes_in(const c10::IValue& value) {
  if (value.isTensor()) return bytes_in(value.toTensor());
  double bytes = 0;
  if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorList()) bytes += bytes_in(each);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toList()) bytes += bytes_in(each);
  }
  return bytes;
}

double argument_bytes(const OperatorTraffic& traffic, c10::ArrayRef<c10::IValue> arguments) {
  if (!traffic.moves) return 0;
  double bytes = 0;
  for (size_t i = 0; i < std::min<size_t>(arguments.size(), 64); ++i) {
    if (traffic.picks && i == 0) continue; // what is read of it is counted with the results
    const auto times = ((traffic.read >> i) & 1) + ((traffic.written >> i) & 1);
    if (times > 0) bytes += static_cast<double>(times) * bytes_in(arguments[i]);
  }
  return bytes;
}

double result_bytes(const OperatorTraffic& traffic, const std::vector<c10::IValue>& results) {
  if (!traffic.moves || !traffic.returns) return 0;
  double bytes = 0;
  for (const auto& each : results) bytes += bytes_in(each);
  return traffic.picks ? 2 * bytes : bytes;
}

} // namespace tessera::internal
