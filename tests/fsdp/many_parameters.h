#pragma once

// Groups of many parameters, whose pieces are copied otherwise than those of a few on devices with streams.

#include <torch/torch.h>

#include <string>
#include <vector>

#include <tessera/fsdp/fully_shard.h>

namespace tessera::testing {

enum class Rows { kEven, kUneven, kAny };

/// Rows of parameter `i`: as many on each of up to 4 ranks, or fewer on the last, or none on some.
inline int64_t rows_of(int64_t i, Rows rows) {
  switch (rows) {
    case Rows::kEven: return 4 * (1 + i % 3);
    case Rows::kUneven: return 3 + i % 4;
    case Rows::kAny: return i % 6;
  }
  return 0;
}

/// A group of P parameters of integers, whose gradients every dtype can hold.
struct ManyImpl : torch::nn::Module {
  ManyImpl(int64_t count, Rows rows) {
    for (int64_t i = 0; i < count; ++i) {
      const auto sizes = i % 7 == 3 ? std::vector<int64_t>{rows_of(i, rows)} : std::vector<int64_t>{rows_of(i, rows), 1 + i % 5};
      const auto values = torch::arange(c10::multiply_integers(sizes)).remainder(11).to(torch::kFloat) - 5;
      weights.push_back(register_parameter(c10::str("w", i), values.reshape(sizes)));
    }
  }
  /// Of which the gradients are w, or twice w for every other one.
  torch::Tensor forward() {
    torch::Tensor sum;
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto term = (weights[i] * weights[i]).sum().to(torch::kFloat) * (i % 2 == 0 ? 0.5 : 1.0);
      sum = sum.defined() ? sum + term : term;
    }
    return sum;
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Many);

struct ManyCase {
  std::string name;
  FullyShardOptions options;
  int64_t most_of_gather, most_of_reduction; ///< launches
};

inline std::vector<ManyCase> many_cases() {
  const MixedPrecisionPolicy bf16{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  std::vector<ManyCase> all{
      {"ragged", {}, 0, 2}, {"ragged in bf16", {}, 1, 3}, {"per parameter", {}, 2, 2}, {"per parameter in bf16", {}, 3, 3}};
  all[1].options.mixed_precision = all[3].options.mixed_precision = bf16;
  all[2].options.layout = all[3].options.layout = BufferLayout::kPerParameter;
  return all;
}

} // namespace tessera::testing
