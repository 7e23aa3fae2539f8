#include <tessera/dtensor/redistribute/redistribute.h>

#include "layouts.h"

namespace tessera {
namespace {

using namespace testing;

/// Values that every Partial of `lay_out` splits without rounding.
at::Tensor values(const std::vector<int64_t>& sizes) {
  const auto numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return torch::arange(1, numel + 1, torch::kFloat).view(sizes);
}

bool is_norm(const Placement& placement) {
  const auto* partial = std::get_if<Partial>(&placement);
  return partial && partial->op == Partial::Op::kNorm;
}

bool fits(const DeviceMesh& mesh, const Placements& placements, const std::vector<int64_t>& sizes) {
  try {
    Spec::intern(mesh, placements, sizes, at::kFloat);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

void check_move(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& from, const Placements& to) {
  const auto source = make(whole, mesh, from);
  for (const auto& placement : to) {
    if (!is_norm(placement)) continue;
    if (from == to || !is_sharded(from[0])) break;
    EXPECT_THROWS_WITH(source.redistribute(to),
                       "redistribute: only a replicated tensor can be turned into a Partial(norm 2), not a ");
    return;
  }
  const auto before = source.local().clone();
  const auto moved = source.redistribute(to);
  const auto context = to_string(from) + " -> " + to_string(to) + " of " + source.spec().to_string();
  EXPECT_EQ(moved.sizes(), whole.sizes());
  EXPECT_EQ(moved.local().sizes(), lay_out(whole, mesh, to).sizes()) << context;
  bool partial = false;
  for (const auto& placement : to) partial = partial || is_partial(placement);
  if (!partial) {
    EXPECT_TENSORS_CLOSE(moved.local(), lay_out(whole, mesh, to)) << context;
  }
  EXPECT_TENSORS_CLOSE(moved.full_tensor(), whole) << context;
  EXPECT_TENSORS_EQUAL(source.local(), before) << context << ": the source changed";
}

TEST(Redistribute, every_pair_on_one_dim) {
  const auto mesh = line_mesh();
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{8, 4}, {5, 3}, {1, 7}, {3}, {2, 3, 2}, {0, 3}}) {
    auto placements = whole_placements(sizes, mesh.size());
    for (const auto& placement : partials()) placements.push_back(placement);
    for (const auto& from : placements) {
      for (const auto& to : placements) check_move(values(sizes), mesh, {from}, {to});
    }
  }
}

TEST(Redistribute, pairs_on_two_dims) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"});
  struct Case {
    std::vector<int64_t> sizes;
    Placements from, to;
  };
  std::vector<Case> cases;
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {4, 2}, {1, 3}}) {
    auto single = whole_placements(sizes, 2);
    single.push_back(Partial{});
    std::vector<Placements> pairs;
    for (const auto& a : single) {
      for (const auto& b : single) {
        if (fits(mesh, {a, b}, sizes)) pairs.push_back({a, b});
      }
    }
    for (const auto& from : pairs) {
      for (const auto& to : pairs) cases.push_back({sizes, from, to});
    }
  }
  for (const auto& c : sweep(cases, 300)) check_move(values(c.sizes), mesh, c.from, c.to);
}

TEST(Redistribute, zero_dims_and_other_dtypes) {
  const auto mesh = line_mesh();
  check_move(torch::tensor(3.0F), mesh, {Partial{}}, {Replicate{}});
  check_move(torch::tensor(3.0F), mesh, {Replicate{}}, {Partial{}});
  for (const auto dtype : {at::kLong, at::kInt, at::kDouble, at::kByte}) {
    const auto whole = values({5, 2}).to(dtype);
    const auto source = from_local(lay_out(whole, mesh, {Shard{0}}), mesh, {Shard{0}}, whole.sizes().vec());
    EXPECT_TENSORS_EQUAL(source.full_tensor(), whole);
    EXPECT_TENSORS_EQUAL(source.redistribute({Shard{1}}).local(), lay_out(whole, mesh, {Shard{1}}));
  }
  const auto flags = torch::arange(6).remainder(2).to(at::kBool);
  const auto any = from_local(flags, mesh, {Partial{Partial::Op::kMax}});
  EXPECT_TENSORS_EQUAL(any.full_tensor(), flags);
}

TEST(Redistribute, norms_of_narrow_types_do_not_overflow) {
  const auto mesh = line_mesh();
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    const auto parts = from_local(torch::full({2}, 1024).to(dtype), mesh, {Partial{Partial::Op::kNorm}});
    EXPECT_TENSORS_CLOSE(parts.full_tensor(), torch::full({2}, 1024 * std::sqrt(mesh.size())).to(dtype), 1e-2);
  }
}

TEST(Redistribute, a_norm_has_no_sign) {
  const auto mesh = line_mesh();
  EXPECT_THROWS_WITH(
      make(-values({2}), mesh, {Replicate{}}).redistribute({Partial{Partial::Op::kNorm}}),
      "redistribute: a tensor with negative values cannot be turned into a Partial(norm 2), which has no sign; redistribute "
      "the Partial tensors beside it to Replicate first");
}

TEST(Redistribute, gradients) {
  const auto mesh = line_mesh();
  const auto whole = values({5, 3});
  for (const auto& from : whole_placements({5, 3}, mesh.size())) {
    for (const auto& to : whole_placements({5, 3}, mesh.size())) {
      auto local = lay_out(whole, mesh, {from}).requires_grad_();
      const auto source = from_local(local, mesh, {from}, whole.sizes().vec());
      (source.redistribute({to}).full_tensor() * whole).sum().backward();
      EXPECT_TENSORS_EQUAL(local.grad(), lay_out(whole, mesh, {from})) << to_string(from) << " -> " << to_string(to);
    }
  }
}

TEST(Redistribute, gradient_of_partial_is_replicated) {
  const auto mesh = line_mesh();
  const auto whole = values({2, 2});
  auto local = lay_out(whole, mesh, {Partial{}}).requires_grad_();
  (from_local(local, mesh, {Partial{}}).redistribute({Replicate{}}).full_tensor() * whole).sum().backward();
  EXPECT_TENSORS_EQUAL(local.grad(), whole);
}

TEST(Redistribute, plans_shrink_first_and_never_cross) {
  using Steps = std::vector<RedistributeStep>;
  const Placement replicate = Replicate{}, partial = Partial{}, shard0 = Shard{0}, shard1 = Shard{1};
  EXPECT_EQ(plan_redistribute({shard0, partial}, {replicate, replicate}), (Steps{{1, replicate}, {0, replicate}}));
  EXPECT_EQ(plan_redistribute({partial, replicate}, {shard0, shard0}), (Steps{{0, shard0}, {1, shard0}}));
  EXPECT_EQ(plan_redistribute({shard0, shard0}, {shard1, shard0}), (Steps{{1, replicate}, {0, shard1}, {1, shard0}}));
  EXPECT_EQ(plan_redistribute({replicate, shard0}, {shard0, replicate}), (Steps{{1, replicate}, {0, shard0}}));
  EXPECT_EQ(plan_redistribute({shard0, shard1}, {shard0, shard1}), Steps{});
}

} // namespace
} // namespace tessera
