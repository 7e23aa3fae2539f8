// Blocks with autograd functions of their own.
#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/fsdp/scripts/block.h>

namespace tessera::testing::scripts {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.matmul(weight.t());
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].matmul(saved[1]), gradients[0].t().matmul(saved[0])};
  }
};

struct SavesParameter : Block {
  explicit SavesParameter(Draw&) : weight(parameter("weight", {kWidth, kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override { return LinearFunction::apply(x, weight).tanh(); }
  bool is_twice_differentiable() const override { return false; }
  Tensor weight;
};

struct ScaleFunction : torch::autograd::Function<ScaleFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& scale) {
    const auto whole = tessera::unsharded(scale);
    context->save_for_backward({x, scale});
    return x * (whole * whole + 1.0);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &scale = saved[1];
    return {gradients[0] * (scale * scale + 1.0), (gradients[0] * x * 2.0 * scale).sum(0)};
  }
};

struct ReadsUnsharded : Block {
  explicit ReadsUnsharded(Draw&) : scale(parameter("scale", {kWidth})) {}
  Tensor forward(const Tensor& x, const Tensor&) override { return ScaleFunction::apply(x, scale).tanh(); }
  bool is_twice_differentiable() const override { return false; }
  Tensor scale;
};

/// Activation checkpointing: its forward runs without grad mode, and once more in backward.
struct Recomputed : Block {
  explicit Recomputed(Draw&) : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))) {}
  Tensor compute(const Tensor& x) { return torch::tanh(linear(x)); }
  Tensor forward(const Tensor& x, const Tensor&) override;
  bool is_twice_differentiable() const override { return false; }
  bool has_inner_backward() const override { return true; }
  torch::nn::Linear linear;
};

struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static Tensor forward(AutogradContext* context, const Tensor& x, Recomputed* block) {
    context->save_for_backward({x});
    context->saved_data["block"] = reinterpret_cast<int64_t>(block);
    return block->compute(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    auto* block = reinterpret_cast<Recomputed*>(context->saved_data["block"].toInt());
    {
      const torch::AutoGradMode grad_mode(true);
      torch::autograd::backward({block->compute(x)}, {gradients[0]});
    }
    return {x.grad(), Tensor()};
  }
};

Tensor Recomputed::forward(const Tensor& x, const Tensor&) {
  if (!torch::GradMode::is_enabled()) return compute(x);
  return Checkpoint::apply(x.requires_grad() ? x : x.detach().requires_grad_(), this);
}

} // namespace

std::vector<BlockKind> function_blocks() {
  return {block_kind<SavesParameter>("saves parameter"), block_kind<ReadsUnsharded>("reads unsharded"),
          block_kind<Recomputed>("recomputed")};
}

} // namespace tessera::testing::scripts
