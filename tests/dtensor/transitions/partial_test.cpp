// Partial tensors: of truth values and whole numbers, whose reductions are linear in few operators, of halves, and as out=.
#include <ATen/record_function.h>
#include <tessera/dtensor/dispatch/fallback.h>
#include <tessera/dtensor/transitions/transition.h>

#include <tessera/tests/dtensor/layouts.h>
#include <tessera/tests/support/test_device.h>

namespace tessera::testing::partial_test {
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
  for (const auto& whole :
       {torch::tensor({true, false, true}), torch::full({3}, 100, torch::kChar), torch::full({3}, 60000, torch::kHalf)}) {
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

/// Compared as integers: a communicator that passes over NaN finds none.
TEST(Partial, MinimaAndMaximaKeepNaN) {
  using internal::redistribute::decode, internal::redistribute::encode;
  const auto mesh = line_mesh();
  constexpr double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  const auto values = torch::tensor({-inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 0.75, 3.0, inf, nan, -nan}, torch::kDouble);
  const auto count = values.numel();
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto left = values.to(mesh.device(), dtype).unsqueeze(1).expand({count, count}), right = left.t();
    for (const auto op : {Op::kMin, Op::kMax}) {
      SCOPED_TRACE(::testing::Message() << dtype << " " << to_string(Placement(Partial{op})));
      const auto sent = [&](const Tensor& tensor) { return encode(tensor, Partial{op}, *mesh.communicator()); };
      ASSERT_FALSE(sent(left).is_floating_point());
      const bool least = op == Op::kMin;
      const auto reduced = least ? at::minimum(sent(left), sent(right)) : at::maximum(sent(left), sent(right));
      EXPECT_TENSORS_CLOSE(decode(reduced, Partial{op}, dtype), least ? at::minimum(left, right) : at::maximum(left, right), 0,
                           0);
    }
  }
  const auto losses = torch::tensor({1.0, 2.0, nan, 4.0});
  const auto split = Tensor(make(losses, mesh, {Shard{0}}));
  for (int64_t i = 0; i < 4; ++i) EXPECT_TENSORS_CLOSE(whole_of(split[i]), losses[i]);
  EXPECT_TRUE(std::isnan(split.max().item<double>()));
  EXPECT_TRUE(std::isnan(split.norm(INFINITY).item<double>()));
}

/// A tensor beside a norm may be negative, which a norm cannot be.
TEST(Partial, NormsAreReducedBesideNegativeTensors) {
  const auto mesh = line_mesh();
  const auto whole = torch::tensor({3.0, 4.0, 0.0, -12.0});
  const auto norm = Tensor(make(whole, mesh, {Shard{0}})).norm();
  for (const double number : {2.0, -2.0, 2.0}) {
    const auto expected = torch::stack({whole.norm(), torch::tensor(number)});
    for (const Placement& placement : {Placement(Replicate{}), Placement(Partial{})}) {
      const auto beside = Tensor(make(torch::tensor(number), mesh, {placement}));
      const auto stacked = torch::stack({norm, beside});
      EXPECT_TENSORS_CLOSE(whole_of(stacked), expected);
      EXPECT_TENSORS_CLOSE(whole_of(torch::cat({beside.view({1}), norm.view({1})})), expected.flip(0));
      const bool joins = world_size() > 1 && number > 0 && placement == Placement(Replicate{});
      if (joins) EXPECT_TRUE(is_partial(DTensor(stacked).placements()[0]));
    }
  }
}

/// How often `function` asks a tensor for its negative values.
int64_t sign_questions(const std::function<void()>& function) {
  thread_local int64_t count;
  count = 0;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        count += std::string_view(function.name()) == "aten::lt";
        return nullptr;
      }));
  function();
  at::removeCallback(handle);
  return count;
}

/// A question waits for the device, and a plan costs more than the call.
TEST(Partial, WhatIsBesideANormIsLookedAtOnce) {
  const auto mesh = line_mesh();
  const auto norm = Tensor(make(torch::tensor({3.0, 4.0}), mesh, {Shard{0}})).norm();
  for (const double number : {2.0, -2.0}) {
    const auto beside = Tensor(make(torch::tensor(number), mesh, {Replicate{}}));
    const auto stack = [&] { torch::stack({norm, beside}); };
    stack();
    const auto misses = internal::dispatch::cache_statistics().misses;
    EXPECT_LE(sign_questions(stack), tests_the_cpu() ? 1 : 2) << "the simulated device calls the kernel of the CPU";
    EXPECT_EQ(internal::dispatch::cache_statistics().misses, misses);
  }
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
} // namespace tessera::testing::partial_test
