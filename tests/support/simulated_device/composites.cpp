#include <tessera/tests/support/simulated_device/composites.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/TensorBody.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

namespace tessera::testing::sim {

namespace {

bool is_given(const std::optional<at::Tensor>& bias) { return bias && bias->defined(); }

} // namespace

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double probability, std::optional<bool> train) {
  if (!train.value_or(true) || probability == 0) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  const double kept = 1 - probability;
  const auto noise = at::empty_like(input).bernoulli_(kept);
  return {input * (noise / (kept == 0 ? 1 : kept)), noise.to(at::kBool)};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden, const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
  const auto input = (is_given(input_bias) ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto state = (is_given(hidden_bias) ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const auto reset = (state[0] + input[0]).sigmoid(), update = (state[1] + input[1]).sigmoid();
  const auto candidate = (input[2] + state[2] * reset).tanh();
  return {(hidden - candidate) * update + candidate, at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cell, const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
  auto sum = input_gates + hidden_gates;
  if (is_given(input_bias)) sum = sum + *input_bias + *hidden_bias;
  const auto gates = sum.chunk(4, 1);
  const auto next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, at::Tensor()};
}

} // namespace tessera::testing::sim
