#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/tests/support/draw.h>

namespace tessera::testing::scripts {

using torch::Tensor;

constexpr int64_t kWidth = 6;
constexpr int64_t kIdsPerRow = 3;
constexpr int64_t kVocabulary = 7;

/// A part of a random model, from x of shape [batch, kWidth] to the same shape. `ids` has the shape [batch, kIdsPerRow] and
/// values below kVocabulary, for tables. Every block uses its parameters in a way of its own.
struct Block : torch::nn::Module {
  virtual Tensor forward(const Tensor& x, const Tensor& ids) = 0;
  /// Whether a gradient can be taken of its gradient.
  virtual bool is_twice_differentiable() const { return true; }
  /// Whether its backward runs another one, in which gradients land that nothing foretold.
  virtual bool has_inner_backward() const { return false; }
  /// Whether a backward may read one of its parameters once that has its gradient.
  virtual bool reads_beside_gradient() const { return has_inner_backward(); }

 protected:
  Tensor parameter(const std::string& name, torch::IntArrayRef sizes) {
    return register_parameter(name, torch::randn(sizes) * 0.4);
  }
  /// Sometimes gives a weight other strides, as channels_last does.
  static void maybe_permute(Draw& draw, Tensor& weight) {
    if (!draw.chance(25)) return;
    const torch::NoGradGuard no_grad;
    const int64_t from = draw.chance(70) ? 1 : 0;
    weight.set_data(weight.movedim(from, -1).contiguous().movedim(-1, from));
  }
};
using BlockPtr = std::shared_ptr<Block>;

struct BlockKind {
  std::string name;
  std::function<BlockPtr(Draw&)> make;
};

template <typename Made>
BlockKind block_kind(const std::string& name) {
  return {name, [](Draw& draw) { return std::make_shared<Made>(draw); }};
}

/// The kinds of one file each.
std::vector<BlockKind> module_blocks();
std::vector<BlockKind> layer_blocks();
std::vector<BlockKind> parameter_blocks();
std::vector<BlockKind> view_blocks();
std::vector<BlockKind> function_blocks();

/// All of them, and a block of blocks.
std::vector<BlockKind> block_kinds();
/// Those whose rows are independent of each other, so that each rank's may be computed by itself, that keep nothing from one
/// forward to the next, whose backward reads parameters through autograd alone, and whose parameters are not trained in float.
std::vector<BlockKind> block_kinds_by_rows();

} // namespace tessera::testing::scripts
