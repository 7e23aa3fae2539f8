// The layers that a mixture of experts is made of.

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/options/linear.h>

#include <tessera/fsdp/unsharded.h>
#include <tessera/parallel/moe.h>

namespace tessera {

FeedForwardImpl::FeedForwardImpl(int64_t width, int64_t hidden, ExpertKind kind) {
  const auto layer = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  };
  if (kind == ExpertKind::kSwiGLU) gate = layer("gate", width, hidden);
  up = layer("up", width, hidden);
  down = layer("down", hidden, width);
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) {
  return down->forward(gate ? at::silu(gate->forward(x)) * up->forward(x) : at::gelu(up->forward(x)));
}

StackedExpertsImpl::StackedExpertsImpl(int64_t experts, int64_t width, int64_t hidden, ExpertKind kind) {
  if (kind == ExpertKind::kSwiGLU) gate = register_parameter("gate", at::empty({experts, hidden, width}));
  up = register_parameter("up", at::empty({experts, hidden, width}));
  down = register_parameter("down", at::empty({experts, width, hidden}));
}

at::Tensor StackedExpertsImpl::forward(const at::Tensor& tokens, const std::vector<int64_t>& counts) {
  const auto raised = grouped_linear(tokens, counts, up);
  const auto hidden = gate.defined() ? at::silu(grouped_linear(tokens, counts, gate)) * raised : at::gelu(raised);
  return grouped_linear(hidden, counts, down);
}

RouterImpl::RouterImpl(int64_t width, int64_t experts, bool has_bias) {
  weight = register_parameter("weight", at::empty({experts, width}));
  if (has_bias) bias = register_buffer("bias", at::zeros({experts}));
}

at::Tensor RouterImpl::forward(const at::Tensor& x) {
  const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return at::linear(x.to(dtype), unsharded(weight).to(dtype)); // what forward reads, which a policy may have cast
}

} // namespace tessera
