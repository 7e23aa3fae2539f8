#include <ATen/TensorOperators.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <numeric>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/parallel/experts.h>

namespace tessera {

namespace {

constexpr int64_t kAlignment = 16; // bytes, of the rows that the kernel takes

/// Tokens of another dtype are cast beside a weight of `fully_shard`, or are an error of the kernel.
bool fits_kernel(const at::Tensor& weight) {
  const auto dtype = weight.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  const auto is_aligned = [&](int64_t features) { return features * static_cast<int64_t>(weight.itemsize()) % kAlignment == 0; };
  return is_aligned(weight.size(1)) && is_aligned(weight.size(2)) && weight.is_contiguous();
}

/// [counts[0], counts[0] + counts[1], …] on the device of the tokens.
at::Tensor ends_of(const std::vector<int64_t>& counts, c10::Device device) {
  std::vector<int32_t> ends(counts.size());
  int64_t end = 0;
  for (size_t i = 0; i < counts.size(); ++i) ends[i] = static_cast<int32_t>(end += counts[i]);
  return at::tensor(ends, at::kInt).to(device);
}

at::Tensor by_kernel(const at::Tensor& tokens, const std::vector<int64_t>& counts, const at::Tensor& weight) {
  auto result = at::_grouped_mm(tokens.contiguous(), weight.transpose(1, 2), ends_of(counts, tokens.device()));
  // The kernel of the derivative takes no expanded gradient.
  if (result.requires_grad()) result.register_hook([](const at::Tensor& gradient) { return gradient.contiguous(); });
  return result;
}

/// `tokens` in the parts of the experts.
std::vector<at::Tensor> parts_of(const at::Tensor& tokens, const std::vector<int64_t>& counts) {
  return tokens.split_with_sizes(counts, 0);
}

at::Tensor by_loop(const at::Tensor& tokens, const std::vector<int64_t>& counts, const at::Tensor& weight) {
  const auto parts = parts_of(tokens, counts);
  const auto weights = weight.unbind(0);
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < parts.size(); ++i) results.push_back(at::linear(parts[i], weights[i]));
  return at::cat(results);
}

/// Each token with the row of its expert in `bias`.
at::Tensor add_bias(const at::Tensor& result, const std::vector<int64_t>& counts, const at::Tensor& bias) {
  const auto parts = parts_of(result, counts);
  const auto rows = bias.unbind(0);
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < parts.size(); ++i) sums.push_back(parts[i] + rows[i]);
  return at::cat(sums);
}

} // namespace

at::Tensor local_experts(const at::Tensor& parameter) {
  auto read = unsharded(parameter);
  if (!is_dtensor(read)) return read;
  const DTensor split(read);
  TORCH_CHECK_VALUE(split.placements() == Placements{Shard{0}}, "local_experts: the parameter lies as ", split.spec().to_string(),
                    ", but one of expert_parallel is Shard(0) over one dim. Call expert_parallel before parallelize");
  return to_local(split);
}

at::Tensor grouped_linear(const at::Tensor& tokens, const std::vector<int64_t>& counts, const at::Tensor& weight,
                          const at::Tensor& bias) {
  const auto own = local_experts(weight);
  const auto all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  TORCH_CHECK_VALUE(own.dim() == 3 && own.size(0) == static_cast<int64_t>(counts.size()),
                    "grouped_linear: the weight has the shape ", own.sizes(), " on rank ", process_context().rank(),
                    ", but must be [experts, out, in] with the ", counts.size(), " experts of the counts");
  TORCH_CHECK_VALUE(tokens.dim() == 2 && tokens.size(0) == all && tokens.size(1) == own.size(2),
                    "grouped_linear: the tokens have the shape ", tokens.sizes(), " on rank ", process_context().rank(),
                    ", but the counts sum to ", all, " tokens, and the weight takes ", own.size(2), " features");
  const auto result = fits_kernel(own) ? by_kernel(tokens, counts, own) : by_loop(tokens, counts, own);
  return bias.defined() ? add_bias(result, counts, local_experts(bias)) : result;
}

} // namespace tessera
