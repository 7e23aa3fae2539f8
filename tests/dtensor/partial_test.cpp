// Partial tensors: of truth values and whole numbers, whose reductions are linear in few operators, of halves, and as out=.
#include <tessera/dtensor/redistribute/transition.h>

#include "layouts.h"

namespace tessera::testing {
namespace {

using at::Tensor;
using Op = Partial::Op;

/// This rank's `part` of a Partial tensor.
Tensor parts(const Tensor& part, Op op) {
  const auto mesh = line_mesh();
  return from_local(part.to(mesh.device()), mesh, {Partial{op}});
}

TEST(Partial, OfTruthValuesIsNoSumOfNumbers) {
  const auto any = parts(torch::ones({2}, torch::kBool), Op::kSum);
  const auto numbers = Tensor(make(torch::tensor({3, 4}), line_mesh(), {Replicate{}}));
  EXPECT_TENSORS_EQUAL(whole_of(any), torch::ones({2}, torch::kBool));
  EXPECT_EQ(whole_of(any.sum()).item<int64_t>(), 2);
  EXPECT_TENSORS_EQUAL(whole_of(any * numbers), torch::tensor({3, 4}));
  EXPECT_TENSORS_EQUAL(whole_of(any + numbers), torch::tensor({4, 5}));
  EXPECT_TENSORS_EQUAL(whole_of(torch::cat({any, numbers})), torch::tensor({1, 1, 3, 4}));
  const auto both = any * Tensor(make(torch::tensor({true, false}), line_mesh(), {Replicate{}}));
  EXPECT_TENSORS_EQUAL(whole_of(both), torch::tensor({true, false}));
  EXPECT_EQ(DTensor(both).placements(), Placements{Partial{}});
}

/// Arithmetic makes nothing else of it; what only moves elements, or writes all of them, does not look at it.
TEST(Partial, AnAverageOfWholeNumbersIsNotDefined) {
  auto mean = parts(torch::full({2}, 3), Op::kAvg);
  const auto halves = Tensor(make(torch::full({2}, 0.5), line_mesh(), {Replicate{}}));
  for (const auto& run :
       std::vector<std::function<Tensor()>>{[&] { return mean.mul(3); }, [&] { return mean * 0.5; }, [&] { return mean + mean; },
                                            [&] { return mean.sum(); }, [&] { return torch::where(halves > 0, mean, -0.5); },
                                            [&] {
                                              return torch::cat({mean, halves});
                                            }}) {
    if (world_size() > 1) {
      EXPECT_THROWS_WITH(run(), "the average of Long is not defined");
    } else {
      EXPECT_NO_THROW(run());
    }
  }
  for (const auto& moved : {torch::stack({mean, mean}), mean.clone().zero_(), mean.fill_(4)}) {
    EXPECT_EQ(DTensor(moved).placements(), Placements{Partial{Op::kAvg}});
  }
  EXPECT_TENSORS_EQUAL(to_local(mean), torch::full({2}, 4));
}

TEST(Partial, OfNarrowTypesHoldsItsValue) {
  const auto mesh = line_mesh();
  for (const auto& whole : {torch::tensor({true, false, true}), torch::full({3}, 100, torch::kChar)}) {
    for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), Placement(StridedShard{0, 2})}) {
      for (const auto op : {Op::kSum, Op::kProduct}) {
        SCOPED_TRACE(::testing::Message() << whole.dtype() << " " << placement << " " << to_string(Placement(Partial{op})));
        const auto partial = make(whole, mesh, {placement}).redistribute({Partial{op}});
        EXPECT_TENSORS_EQUAL(partial.full_tensor(), whole);
        EXPECT_TENSORS_EQUAL(partial.redistribute({Shard{0}}).full_tensor(), whole);
      }
    }
    if (world_size() == 1) continue;
    EXPECT_THROWS_WITH(make(whole, mesh, {Shard{0}}).redistribute({Partial{Op::kAvg}}), "cannot be turned into a Partial(avg)");
  }
}

/// The number of ranks whose value is true wraps around in a byte.
TEST(Partial, TruthValuesAreNotCounted) {
  using internal::redistribute::wire_op;
  for (const auto op : {Op::kSum, Op::kMask}) EXPECT_EQ(wire_op(Partial{op}, at::kBool), ReduceOp::kMax);
  EXPECT_EQ(wire_op(Partial{Op::kProduct}, at::kBool), ReduceOp::kMin);
  EXPECT_EQ(wire_op(Partial{}, at::kByte), ReduceOp::kSum);
  const bool first = process_context().rank() == 0;
  EXPECT_TENSORS_EQUAL(whole_of(parts(torch::tensor({first, false}), Op::kSum)), torch::tensor({true, false}));
  EXPECT_TENSORS_EQUAL(whole_of(parts(torch::tensor({first, true}), Op::kProduct)), torch::tensor({world_size() == 1, true}));
}

/// The smallest number, which a rank that divides before it adds rounds to 0.
TEST(Partial, AveragesOfHalvesKeepSmallNumbers) {
  const auto smallest = torch::full({3}, std::pow(2.0, -24)).to(torch::kHalf);
  const auto mean = parts(smallest, Op::kAvg);
  EXPECT_TENSORS_EQUAL(whole_of(mean), smallest);
  const auto split = DTensor(mean).redistribute({Shard{0}});
  EXPECT_EQ(split.scalar_type(), at::kHalf);
  EXPECT_TENSORS_EQUAL(split.full_tensor(), smallest);
}

/// Adding a number to every rank's part adds it once a rank; a weight that is a sum is no factor of both.
TEST(Partial, OutVariantsFollowTheirOwnOverload) {
  const auto mesh = line_mesh();
  const auto whole = torch::tensor({2.0, 5.0});
  const auto sum = [&] { return Tensor(make(whole, mesh, {Partial{}})); };
  using Call = std::function<void(Tensor&, const Tensor&)>;
  const std::vector<Call> calls{[](Tensor& out, const Tensor& x) { at::add_out(out, x, at::Scalar(1.0)); },
                                [](Tensor& out, const Tensor& x) { at::sub_out(out, x, at::Scalar(1.0)); },
                                [](Tensor& out, const Tensor& x) { at::rsub_out(out, x, at::Scalar(1.0)); }};
  for (const auto& call : calls) {
    auto expected = torch::zeros_like(whole);
    call(expected, whole);
    auto out = Tensor(make(torch::zeros_like(whole), mesh, {Replicate{}}));
    call(out, sum());
    EXPECT_TENSORS_CLOSE(whole_of(out), expected);
    auto partial = sum();
    EXPECT_THROWS_WITH(call(partial, partial), "the written tensor would have to change its placement");
  }
  auto between = sum();
  at::lerp_out(between, between, between * 2, between);
  EXPECT_TENSORS_CLOSE(whole_of(between), whole.lerp(whole * 2, whole));
  auto halved = sum();
  at::div_out(halved, halved, at::Scalar(2.0));
  EXPECT_TENSORS_EQUAL(whole_of(halved), whole / 2);
}

} // namespace
} // namespace tessera::testing
