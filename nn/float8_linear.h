#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

#include <tessera/nn/float8_scaling.h>

namespace tessera {

/// input · weightᵀ + bias in fp8: the input [..., in] and the weight [out, in] as float8_e4m3fn, and in backward the output's
/// gradient as float8_e5m2. The three products of forward and backward are `aten::_scaled_mm`, which adds up in fp32. The result
/// has the dtype of the input.
///
/// A scale is the smallest power of two with which the largest number fits, of the tensor as it is now (dynamic scaling), so that
/// nothing but the 3 and 2 bits of the codes is lost. A DTensor's largest number is that of all ranks, which all call this; one
/// in terms (Partial), as a gradient of tensor parallelism may be, is summed first. A number that is not finite makes NaN of all
/// that share its scale. Sizes need not be multiples of 16: GPUs get them padded.
///
/// Arguments may be DTensors, and sharded parameters. Errors: integers, other dtypes beside each other, other shapes. A second
/// derivative (create_graph) is an error. Under autocast the arguments are cast as those of `linear` are.
at::Tensor float8_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias = {},
                         Float8Scaling scaling = Float8Scaling::kTensor);

struct Float8Options {
  Float8Scaling scaling = Float8Scaling::kTensor;
  /// Linears that stay as they are, such as the output head: the last parts of their paths ("lm_head", "mlp.gate"). A module
  /// stands for all below it.
  std::vector<std::string> except = {};
};

/// Makes every torch::nn::Linear in `module` and below compute as `float8_linear` does, and returns their names (torchao:
/// convert_to_float8_training).
///
/// Nothing is replaced: modules keep their types, names and parameters, so state dicts, optimizers and checkpoints stay as they
/// are. It may be called before or after `fully_shard` and `parallelize`, on every rank alike, and again with another scaling.
/// The *member* `linear->weight` becomes a stand-in, which gives each operator the parameter that `parameters()` lists, and
/// `linear(x)`, or `x.matmul(linear->weight.t())`, the product in fp8. It has no gradient: ask `parameters()` for it. A copy made
/// by `clone` is a plain Linear. Errors: a name of `except` that names nothing; a module whose weight is not its member's.
std::vector<std::string> convert_to_float8(torch::nn::Module& module, const Float8Options& options = {});

namespace internal {

/// What is behind a member `weight` of a Linear that `convert_to_float8` took; nothing for any other tensor.
struct Float8Weight {
  at::Tensor parameter;
  Float8Scaling scaling;
};
std::optional<Float8Weight> float8_weight(const at::Tensor& member);

} // namespace internal

} // namespace tessera
