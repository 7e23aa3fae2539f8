// Operators on lists of tensors, each under another placement.
#include "op_cases.h"

#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>

namespace tessera::testing::list_ops_test {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

TEST(ListOps, Lists) {
  const auto mesh = line_mesh();
  const auto place = [&](size_t i) {
    return whole_placements({5, 3}, mesh.size())[i % whole_placements({5, 3}, mesh.size()).size()];
  };
  const auto build = [&](bool plain, int64_t seed) {
    Tensors result;
    for (size_t i = 0; i < 6; ++i) {
      const auto whole = values({5, 3}, seed + static_cast<int64_t>(i));
      result.push_back(plain ? whole.clone() : Tensor(make(whole, mesh, {place(i)})));
    }
    return result;
  };
  const auto same = [](const Tensors& a, const Tensors& b) {
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TENSORS_CLOSE(whole_of(a[i]), b[i]) << i;
  };
  auto plain = build(true, 1), sharded = build(false, 1);
  at::_foreach_mul_(plain, 3);
  at::_foreach_mul_(sharded, 3);
  same(sharded, plain);
  at::_foreach_addcdiv_(plain, build(true, 2), build(true, 3), 0.5);
  at::_foreach_addcdiv_(sharded, build(false, 2), build(false, 3), 0.5);
  same(sharded, plain);
  same(at::_foreach_sqrt(sharded), at::_foreach_sqrt(plain));
  same(at::_foreach_norm(sharded), at::_foreach_norm(plain));
  same(at::_foreach_add(sharded, build(false, 7)), at::_foreach_add(plain, build(true, 7)));
  at::_foreach_mul_(sharded, torch::tensor(0.5, torch::kDouble));
  at::_foreach_mul_(plain, 0.5);
  same(sharded, plain);
}

TEST(ListOps, ForeachMulByPartialTensorsKeepsThePlacementThatItWritesIn) {
  const auto mesh = line_mesh();
  Tensors parameters, factors, expected;
  for (const auto op : {Partial::Op::kSum, Partial::Op::kAvg, Partial::Op::kMask, Partial::Op::kSum}) {
    const auto seed = static_cast<int64_t>(parameters.size());
    parameters.push_back(make(values({5, 3}, seed), mesh, {Replicate{}}));
    factors.push_back(make(values({5, 3}, seed + 10), mesh, {Partial{op}}));
    expected.push_back(values({5, 3}, seed) * values({5, 3}, seed + 10));
  }
  at::_foreach_mul_(parameters, factors);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TENSORS_CLOSE(whole_of(parameters[i]), expected[i]);
}

/// One tensor for all positions, however these lie.
TEST(ListOps, ForeachByOneTensorWithoutDims) {
  const auto mesh = line_mesh();
  const Placement placements[]{Replicate{}, Shard{0}, Partial{}, Partial{Partial::Op::kAvg}};
  const auto factor = torch::tensor(3.0, torch::kDouble);
  for (const auto& of_factor : placements) {
    if (is_sharded(of_factor)) continue;
    SCOPED_TRACE(to_string(of_factor));
    Tensors plain, sharded;
    for (const auto& placement : placements) {
      plain.push_back(values({5, 3}, static_cast<int64_t>(plain.size())));
      sharded.push_back(make(plain.back(), mesh, {placement}));
    }
    const auto other = Tensor(make(factor, mesh, {of_factor}));
    const auto products = at::_foreach_mul(sharded, other), sums = at::_foreach_add(sharded, other);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TENSORS_CLOSE(whole_of(products[i]), plain[i] * 3) << i;
      EXPECT_TENSORS_CLOSE(whole_of(sums[i]), plain[i] + 3) << i;
    }
  }
}

TEST(ListOps, APlainTensorInAListIsAnErrorInInferenceModeToo) {
  const c10::InferenceMode inference;
  const auto x = Tensor(make(values({5, 3}, 1), line_mesh(), {Shard{0}}));
  const auto plain = torch::ones({5, 3}, test_device());
  EXPECT_THROWS_WITH(torch::hstack({x, plain}), "aten::cat: a plain tensor of shape [5, 3] (argument 'tensors') cannot be mixed");
}

/// The lists of a fused step over a tensor for each placement, more than are fetched ahead.
struct FusedStep {
  Tensors parameters, gradients, averages, squares, max_squares, steps;
};

FusedStep fused_step(const DeviceMesh& mesh, bool plain, bool plain_steps) {
  FusedStep step;
  for (int64_t round = 0; round < 5; ++round) {
    for (const auto& placement : whole_placements({5, 3}, mesh.size())) {
      int64_t seed = 10 * round;
      for (auto* list : {&step.parameters, &step.gradients, &step.averages, &step.squares, &step.max_squares}) {
        const auto whole = values({5, 3}, ++seed).abs();
        list->push_back(plain ? whole : Tensor(make(whole, mesh, {placement})));
      }
      const auto steps = torch::tensor(3.0).to(plain ? c10::Device(at::kCPU) : test_device()); // with the parameters
      step.steps.push_back(plain || plain_steps ? steps : Tensor(make(steps, mesh, {Replicate{}})));
    }
  }
  return step;
}

using FusedAdam = decltype(at::_ops::_fused_adam_::call);

void expect_fused_equal_to_plain(FusedAdam& run, const DeviceMesh& mesh, bool plain_steps, const std::optional<Tensor>& scale) {
  const auto step = [&](bool plain) {
    auto lists = fused_step(mesh, plain, plain_steps);
    const auto own_scale = scale && !plain ? std::optional(scale->to(test_device())) : scale;
    run(lists.parameters, lists.gradients, lists.averages, lists.squares, lists.max_squares, lists.steps, 0.1, 0.9, 0.99, 0.1,
        1e-8,
        /*amsgrad=*/true, /*maximize=*/false, own_scale, std::nullopt);
    Tensors written;
    for (const auto& list : {lists.parameters, lists.averages, lists.squares, lists.max_squares})
      written.insert(written.end(), list.begin(), list.end());
    return written;
  };
  const auto expected = step(true), actual = step(false);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TENSORS_CLOSE(whole_of(actual[i]), expected[i]) << "tensor " << i;
}

TEST(ListOps, FusedAdamAndAdamw) {
  const auto mesh = line_mesh();
  for (const bool plain_steps : {true, false}) {
    for (const auto& scale : {std::optional<Tensor>(), std::optional(torch::tensor(2.0F))}) {
      for (const bool grad_mode : {true, false}) {
        at::AutoGradMode mode(grad_mode);
        expect_fused_equal_to_plain(at::_ops::_fused_adam_::call, mesh, plain_steps, scale);
        expect_fused_equal_to_plain(at::_ops::_fused_adamw_::call, mesh, plain_steps, scale);
      }
    }
  }
}

} // namespace
} // namespace tessera::testing::list_ops_test
