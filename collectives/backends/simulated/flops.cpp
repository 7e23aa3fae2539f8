#include <tessera/collectives/backends/simulated/flops.h>

#include <ATen/core/Tensor.h>
#include <absl/container/flat_hash_map.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include <tessera/base/dispatch_keys.h>

namespace tessera::internal {

namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

double numel(c10::IntArrayRef sizes) { return static_cast<double>(c10::multiply_integers(sizes)); }

/// [b..., m, k] times [b..., k, n], or a vector in place of the second.
double product(const at::Tensor& a, const at::Tensor& b) {
  return 2 * numel(a.sizes()) * static_cast<double>(b.dim() > 1 ? b.size(-1) : 1);
}

template <size_t a, size_t b>
double product_of(Arguments arguments) {
  return product(arguments[a].toTensor(), arguments[b].toTensor());
}

/// Each side has a matrix a group, [groups, ...], or those of all groups beside each other.
double grouped_product(Arguments arguments) {
  const auto a = arguments[0].toTensor(), b = arguments[1].toTensor();
  return product(a, b) / static_cast<double>(a.dim() > b.dim() ? a.size(0) : 1);
}

/// Each weight meets each position of the output (transposed: of the input) once.
double positions(const at::Tensor& activation) { return numel(activation.sizes()) / static_cast<double>(activation.size(1)); }

double convolution(Arguments arguments) {
  const auto input = arguments[0].toTensor(), weight = arguments[1].toTensor();
  if (arguments[6].toBool()) return 2 * positions(input) * numel(weight.sizes()); // transposed
  const auto stride = arguments[3].toIntVector(), padding = arguments[4].toIntVector(), dilation = arguments[5].toIntVector();
  auto outputs = static_cast<double>(input.size(0));
  for (int64_t d = 2; d < weight.dim(); ++d) {
    const auto at = [&](const auto& list) { return list[std::min(list.size() - 1, static_cast<size_t>(d - 2))]; };
    const int64_t places = (input.size(d) + 2 * at(padding) - at(dilation) * (weight.size(d) - 1) - 1) / at(stride) + 1;
    outputs *= static_cast<double>(places);
  }
  return 2 * outputs * numel(weight.sizes());
}

double convolution_backward(Arguments arguments) {
  const bool transposed = arguments[7].toBool();
  const auto wanted = arguments[10].toBoolList();
  const double one = 2 * positions(arguments[transposed ? 1 : 0].toTensor()) * numel(arguments[2].toTensor().sizes());
  return one * (static_cast<double>(wanted[0]) + static_cast<double>(wanted[1]));
}

/// The keys that the queries see, of all of them: under a causal mask query i sees the first i + 1.
double seen_keys(int64_t queries, int64_t keys, bool is_causal) {
  if (!is_causal) return static_cast<double>(queries) * static_cast<double>(keys);
  const auto rising = static_cast<double>(std::min(queries, keys));
  return rising * (rising + 1) / 2 + static_cast<double>(queries - std::min(queries, keys)) * static_cast<double>(keys);
}

/// `products` of matrices of [b, heads, queries, keys] with the width of a head. Kernels skip what a causal mask hides.
template <size_t query, int products, size_t causal>
double attention(Arguments arguments) {
  const auto q = arguments[query].toTensor(), k = arguments[query + 1].toTensor();
  const double seen = seen_keys(q.size(-2), k.size(-2), arguments[causal].toBool());
  return products * 2 * numel(q.sizes()) / static_cast<double>(std::max<int64_t>(1, q.size(-2))) * seen;
}

using Formula = double (*)(Arguments);

const absl::flat_hash_map<std::string_view, Formula>& formulas() {
  static const auto* const all = new absl::flat_hash_map<std::string_view, Formula>{
      {"aten::mm", product_of<0, 1>},
      {"aten::bmm", product_of<0, 1>},
      {"aten::mv", product_of<0, 1>},
      {"aten::dot", product_of<0, 1>},
      {"aten::addmm", product_of<1, 2>},
      {"aten::addmm_", product_of<1, 2>},
      {"aten::_addmm_activation", product_of<1, 2>},
      {"aten::addmv", product_of<1, 2>},
      {"aten::addmv_", product_of<1, 2>},
      {"aten::baddbmm", product_of<1, 2>},
      {"aten::baddbmm_", product_of<1, 2>},
      {"aten::addbmm", product_of<1, 2>},
      {"aten::addbmm_", product_of<1, 2>},
      {"aten::_scaled_mm", product_of<0, 1>},
      {"aten::_scaled_mm_v2", product_of<0, 1>},
      {"aten::_grouped_mm", grouped_product},
      {"aten::_scaled_grouped_mm", grouped_product},
      {"aten::_scaled_grouped_mm_v2", grouped_product},
      {"aten::convolution", convolution},
      {"aten::convolution_backward", convolution_backward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention<0, 2, 4>},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention<1, 5, 7>},
      {"aten::_scaled_dot_product_flash_attention", attention<0, 2, 4>},
      {"aten::_scaled_dot_product_flash_attention_backward", attention<1, 5, 11>},
      {"aten::_scaled_dot_product_efficient_attention", attention<0, 2, 6>},
      {"aten::_scaled_dot_product_efficient_attention_backward", attention<1, 5, 11>},
      {"aten::_scaled_dot_product_cudnn_attention", attention<0, 2, 6>},
      {"aten::_scaled_dot_product_cudnn_attention_backward", attention<1, 5, 14>},
  };
  return *all;
}

/// Of such a call the kernel on the local parts is counted, which is a call of its own. A sharded parameter, which has the second
/// key too, is read whole.
bool is_on_parts(const c10::IValue& argument) {
  if (!argument.isTensor() || !argument.toTensor().defined()) return false;
  const auto keys = argument.toTensor().key_set();
  return keys.has(kDTensorKey) && !keys.has(kTouchKey);
}

} // namespace

bool is_attention(std::string_view name) { return name.starts_with("aten::_scaled_dot_product_"); }

bool is_float8(std::string_view name) {
  return name.starts_with("aten::_scaled_mm") || name.starts_with("aten::_scaled_grouped_mm");
}

double flops_of(std::string_view name, Arguments arguments) {
  const auto found = formulas().find(name);
  if (found == formulas().end() || std::any_of(arguments.begin(), arguments.end(), is_on_parts)) return 0;
  return found->second(arguments);
}

} // namespace tessera::internal
