#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/api.h>
#include <tessera/reads/read_call.h>

#include <tessera/tests/support/line_mesh.h>
#include <tessera/tests/support/matchers.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera::testing::kinds_test {
namespace {

using internal::CallOrigin;
using internal::Met;
using internal::MetSet;
using internal::ReadCall;
using internal::ReadKind;
using torch::Tensor;

/// What the kinds of this file did, in order.
std::vector<std::string>& log() {
  static std::vector<std::string> lines;
  return lines;
}

Tensor with_kind(const Tensor& dtensor, const ReadKind& kind) {
  const auto& meta = *internal::dtensor_meta(dtensor);
  auto tensor = torch::empty({0});
  internal::become_dtensor(tensor, c10::make_intrusive<internal::ReadMeta>(meta.local, meta.spec, kind),
                           c10::DispatchKeySet(internal::kTouchKey));
  return tensor;
}

Tensor without_kind(const Tensor& tensor) {
  const auto& meta = *internal::dtensor_meta(tensor);
  return internal::make_dtensor(meta.local, meta.spec);
}

/// As a parameter of tensor parallelism: brings what is beside it to Replicate, and what leaves to Shard(0).
class Adapting final : public ReadKind {
 public:
  constexpr Adapting() : ReadKind(Turn::kAdapts) {}
  MetSet meets(const Tensor&, size_t, const internal::OperatorTraits&) const override { return Met::kDTensor; }
  void on_read(ReadCall& call) const override {
    log().push_back("adapts " + call.op.schema().name());
    call.replace([](const Tensor& tensor, size_t) -> std::optional<Tensor> {
      if (internal::read_meta(tensor)) return without_kind(tensor);
      return is_dtensor(tensor) ? std::optional<Tensor>(DTensor(tensor).redistribute({Replicate{}})) : std::nullopt;
    });
    call.proceed();
    call.stack->back() = Tensor(DTensor(call.stack->back().toTensor()).redistribute({Shard{0}}));
  }
};
constexpr Adapting kAdapting;

/// As a sharded parameter over a parallel one: the latter takes its place.
class Substituting final : public ReadKind {
 public:
  constexpr Substituting() : ReadKind(Turn::kSubstitutes) {}
  MetSet meets(const Tensor&, size_t argument, const internal::OperatorTraits& traits) const override {
    return traits.arguments[argument].written ? MetSet(Met::kParameter, Met::kWrittenParameter) : Met::kParameter;
  }
  void on_read(ReadCall& call) const override {
    log().push_back(std::string("substitutes") + (call.met(Met::kPlain) ? ", plain" : "") +
                    (call.met(Met::kWrittenParameter) ? ", written" : "") +
                    (call.origin() == CallOrigin::kProgram ? "" : ", in a backward"));
    call.replace([](const Tensor& tensor, size_t) -> std::optional<Tensor> {
      const auto* meta = internal::read_meta(tensor);
      return meta ? std::optional(with_kind(tensor, kAdapting)) : std::nullopt;
    });
    call.proceed();
  }
};
constexpr Substituting kSubstituting;

class Refusing final : public ReadKind {
 public:
  constexpr Refusing() : ReadKind(Turn::kRefuses) {}
  MetSet meets(const Tensor&, size_t, const internal::OperatorTraits&) const override { return {}; }
  void on_read(ReadCall&) const override { TORCH_CHECK(false, "nothing is to read it"); }
};
constexpr Refusing kRefusing;

/// As most sharded parameters: their parts are read in their place.
class OfOwner final : public ReadKind {
 public:
  explicit OfOwner(const Tensor& plain) : ReadKind(Turn::kRefuses), plain_(plain) {}
  MetSet meets(const Tensor&, size_t, const internal::OperatorTraits&) const override { return Met::kParameter; }
  void on_read(ReadCall& call) const override {
    log().push_back("fallback of " + call.op.schema().name());
    call.replace(
        [&](const Tensor& tensor, size_t) { return internal::read_meta(tensor) ? std::optional(plain_) : std::nullopt; });
    call.below = call.below.remove(internal::kDTensorKey);
    call.proceed();
  }
  internal::PlainRead plain_read(const Tensor&) const override { return {is_plain ? this : nullptr, casts_to}; }
  Tensor plain(const Tensor&) const override {
    log().emplace_back("plain");
    return plain_;
  }
  bool is_plain = true;
  std::optional<torch::ScalarType> casts_to;

 private:
  Tensor plain_;
};

struct Kinds : ::testing::Test {
  Kinds() { log().clear(); }
  const DeviceMesh mesh = line_mesh();
  const Tensor weight = torch::arange(12, torch::kDouble).view({3, 4}), x = torch::arange(20, torch::kDouble).view({5, 4});
  const Tensor weight_rows = distribute_tensor(weight, mesh, {Shard{0}}), x_columns = distribute_tensor(x, mesh, {Shard{1}});
};

TEST_F(Kinds, AdaptsArgumentsAndResults) {
  const auto y = torch::mm(x_columns, with_kind(weight_rows.t().contiguous(), kAdapting));
  EXPECT_EQ(DTensor(y).placements(), Placements{Shard{0}});
  EXPECT_TENSORS_CLOSE(DTensor(y).full_tensor(), x.mm(weight.t()), 1e-12);
  EXPECT_EQ(log(), std::vector<std::string>{"adapts aten::mm"});
}

TEST_F(Kinds, RunsTheKindOfWhatTakesAPlaceAfterwards) {
  const auto product = x_columns.mul(with_kind(distribute_tensor(x, mesh, {Shard{0}}), kSubstituting));
  EXPECT_EQ(DTensor(product).placements(), Placements{Shard{0}});
  EXPECT_TENSORS_CLOSE(DTensor(product).full_tensor(), x * x, 1e-12);
  EXPECT_EQ(log(), (std::vector<std::string>{"substitutes", "adapts aten::mul"}));
}

TEST_F(Kinds, RunsThemInTheOrderOfTheirTurns) {
  const auto adapted = with_kind(weight_rows, kAdapting), substituted = with_kind(weight_rows, kSubstituting);
  EXPECT_TENSORS_CLOSE(DTensor(adapted.add(substituted)).full_tensor(), weight * 2, 1e-12);
  EXPECT_EQ(log(), (std::vector<std::string>{"substitutes", "adapts aten::add"}));
  EXPECT_THROWS_WITH(adapted.add(with_kind(weight_rows, kRefusing)), "nothing is to read it");
  EXPECT_EQ(log().size(), 2);
}

TEST_F(Kinds, KnowWhatTheCallMetAndWhereItComesFrom) {
  const auto substituted = with_kind(weight_rows, kSubstituting);
  EXPECT_ANY_THROW(substituted.add(weight)); // the DTensors below refuse the plain tensor
  EXPECT_EQ(log()[0], "substitutes, plain");
  log().clear();
  auto leaf = torch::ones({2}).requires_grad_();
  leaf.register_hook([&](const Tensor&) { substituted.neg(); });
  leaf.sum().backward();
  EXPECT_EQ(log()[0], "substitutes, in a backward");
}

TEST_F(Kinds, ReadPlainOnesWithoutTheFallback) {
  OfOwner kind(weight), other_kind(weight);
  const auto read = with_kind(weight_rows, kind), other = with_kind(weight_rows, other_kind);
  const auto lines_of = [](const std::function<void()>& call) {
    log().clear();
    call();
    return log();
  };
  using Lines = std::vector<std::string>;
  EXPECT_EQ(lines_of([&] { EXPECT_TENSORS_CLOSE(torch::linear(x, read), x.mm(weight.t()), 1e-12); }), Lines{"plain"});
  EXPECT_EQ(lines_of([&] { EXPECT_TENSORS_CLOSE(weight + read, weight * 2, 1e-12); }), Lines{"plain"});

  // No typed kernel has it; a number is beside it; another owner's is beside it; the kind says no.
  EXPECT_EQ(lines_of([&] { torch::maximum(weight, read); }), Lines{"fallback of aten::maximum"});
  EXPECT_EQ(lines_of([&] { EXPECT_TENSORS_CLOSE(read * 2, weight * 2, 1e-12); }), Lines{"fallback of aten::mul"});
  const auto square = torch::eye(4, torch::kDouble);
  EXPECT_EQ(lines_of([&] { EXPECT_TENSORS_CLOSE(torch::addmm(read, other, square), weight * 2, 1e-12); }),
            (Lines{"fallback of aten::addmm", "fallback of aten::addmm"}));
  kind.casts_to = torch::kDouble;
  EXPECT_EQ(lines_of([&] { EXPECT_TENSORS_CLOSE(weight + read, weight * 2, 1e-12); }), Lines{"plain"});
  EXPECT_EQ(lines_of([&] { weight.to(torch::kFloat) + read; }), Lines{"fallback of aten::add"});
  kind.is_plain = false;
  EXPECT_EQ(lines_of([&] { EXPECT_TENSORS_CLOSE(weight * read, weight * weight, 1e-12); }), Lines{"fallback of aten::mul"});
}

} // namespace
} // namespace tessera::testing::kinds_test
