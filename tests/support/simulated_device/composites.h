#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

// Kernels of operators that the CPU does not have, in parts that it has.
namespace tessera::testing::sim {

/// The mask is drawn on the host, as the CPU's dropout draws it.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double probability, std::optional<bool> train);

/// The cells of GRU and LSTM as the CPU computes them. Autograd sees the parts.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden, const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias);
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cell, const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias);

} // namespace tessera::testing::sim
