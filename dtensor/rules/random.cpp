#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/eye.h>

#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::rules {

namespace {

/// Only the tensor that is filled is split; others (probabilities) are whole.
Factorization draw(const OpCall& call) {
  auto factors = first_input_factors(call);
  factors.outputs.push_back(factors.inputs[0]);
  factors.merges_leading = true;
  return factors;
}

/// Draws the whole tensor, as one device would, and keeps this rank's part: the same values for every placement.
void draw_local(const LocalCall& call) {
  const auto local = call.arg(0).toTensor();
  const auto& spec = *call.inputs[0];
  const auto whole = at::empty_strided(spec.sizes(), spec.strides(), local.options());
  call.arg(0) = whole;
  call.op.callBoxed(*call.stack);
  local.copy_(redistribute_local(whole, *spec.with(Placements(spec.placements().size())), spec, call.op.operator_name().name));
  call.stack->back() = local;
}

/// torch::nn::init::eye_: the matrix goes whole into the out= argument, which keeps its part.
void eye_out(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  const auto out = stack->back().toTensor();
  const auto count = op.schema().arguments().size(), begin = stack->size() - count;
  const auto rows = (*stack)[begin].toInt(), columns = count > 2 ? (*stack)[begin + 1].toInt() : rows;
  TORCH_CHECK(out.dim() == 2 && out.size(0) == rows && out.size(1) == columns, op.operator_name(), ": out= has shape ",
              out.sizes(), ", not [", rows, ", ", columns, "]; a DTensor is not resized");
  out.copy_(at::eye(rows, columns, at::TensorOptions().dtype(out.dtype()).device(out.device())));
  stack->resize(begin);
  stack->emplace_back(out);
}

} // namespace

void register_random(Registry& registry) {
  registry.add(
      "uniform. normal. random. random.from random.to exponential. cauchy. log_normal. geometric. bernoulli.float "
      "bernoulli.Tensor",
      {.factorize = draw, .local = draw_local});
  registry.add("bernoulli. bernoulli.p", {.decompose = true});
  registry.add("eye.out eye.m_out", {.handler = eye_out});
}

} // namespace tessera::rules
