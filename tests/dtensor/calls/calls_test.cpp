// What dispatch knows of a call before it decides: the operator's schema, the key of its plan, where the call comes from.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <tessera/activations/recompute.h>
#include <tessera/dtensor/calls/call_key.h>
#include <tessera/dtensor/calls/call_origin.h>
#include <tessera/dtensor/calls/list_positions.h>
#include <tessera/dtensor/calls/op_info.h>
#include <tessera/dtensor/calls/visit_tensors.h>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::calls_test {
namespace {

using at::Tensor;
using internal::CallOrigin;
using internal::dispatch::any_tensor, internal::dispatch::replace_tensors, internal::dispatch::visit_tensors;
using internal::dispatch::ArgKind, internal::dispatch::CallSchema, internal::dispatch::read_schema;
using internal::dispatch::CallKey, internal::dispatch::KeyState, internal::dispatch::make_key;
using internal::dispatch::op_info, internal::dispatch::run_by_position, internal::dispatch::written_positions;

c10::OperatorHandle op_of(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + name).c_str(), overload);
}

CallSchema schema_of(const char* name, const char* overload = "") { return read_schema(op_of(name, overload).schema()); }

TEST(CallSchema, TellsWhatIsWritten) {
  const auto add = schema_of("add", "Tensor");
  EXPECT_FALSE(add.writes || add.views || add.returns_list || add.writes_places);
  ASSERT_EQ(add.arguments.size(), 3);
  EXPECT_EQ(add.arguments[0].kind, ArgKind::kTensor);
  EXPECT_EQ(add.arguments[2].kind, ArgKind::kNumber);
  EXPECT_EQ(add.returns[0].written_argument, -1);

  const auto in_place = schema_of("add_", "Tensor");
  EXPECT_TRUE(in_place.writes && in_place.arguments[0].written && !in_place.arguments[0].out);
  EXPECT_EQ(in_place.returns[0].written_argument, 0);

  const auto out = schema_of("add", "out");
  EXPECT_TRUE(out.writes && out.arguments[3].written && out.arguments[3].out);
  EXPECT_EQ(out.returns[0].written_argument, 3);

  EXPECT_TRUE(schema_of("index_fill_", "int_Scalar").writes_places);
  EXPECT_TRUE(schema_of("masked_fill_", "Scalar").writes_places);
  EXPECT_FALSE(schema_of("masked_fill", "Scalar").writes_places);
}

TEST(CallSchema, TellsViewsAndLists) {
  const auto transposed = schema_of("t");
  EXPECT_TRUE(transposed.views && transposed.returns[0].view && !transposed.writes);
  const auto split = schema_of("split", "Tensor");
  EXPECT_TRUE(split.views && split.returns_list);
  const auto cat = schema_of("cat");
  EXPECT_EQ(cat.arguments[0].kind, ArgKind::kTensorList);
  EXPECT_EQ(cat.tensors, (absl::InlinedVector<size_t, 4>{0}));
  const auto foreach_add = schema_of("_foreach_add_", "List");
  EXPECT_TRUE(foreach_add.writes && foreach_add.returns.empty());
  EXPECT_EQ(foreach_add.tensors.size(), 2);
  EXPECT_EQ(schema_of("bernoulli").arguments[1].kind, ArgKind::kDynamic); // a generator
}

TEST(OpInfo, NamesTheWayOfAnOperator) {
  const auto& add = op_info(op_of("add", "Tensor"));
  EXPECT_EQ(add.name, "aten::add.Tensor");
  EXPECT_NE(add.rule, nullptr);
  EXPECT_FALSE(add.decomposition || add.replicates || add.is_backward || add.reads_no_value);
  EXPECT_EQ(&add, &op_info(op_of("add", "Tensor"))); // read once
  EXPECT_TRUE(op_info(op_of("zeros_like")).reads_no_value);
  EXPECT_TRUE(op_info(op_of("threshold_backward")).is_backward);
  const auto& storage = op_info(op_of("set_", "source_Tensor"));
  EXPECT_TRUE(storage.rule == nullptr && !storage.decomposition && !storage.replicates);
}

CallKey key_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
               KeyState expected = KeyState::kComplete) {
  CallKey key;
  EXPECT_EQ(make_key(op_info(op), arguments, key), expected);
  return key;
}

Tensor placed(const std::vector<int64_t>& sizes, const Placement& placement, at::ScalarType dtype = at::kFloat) {
  return Tensor(distribute_tensor(torch::ones(sizes, dtype), line_mesh(), {placement}));
}

TEST(CallKey, IsTheSameForCallsOfOnePlan) {
  const auto op = op_of("add", "Tensor");
  const auto rows = placed({4, 3}, Shard{0}), others = placed({4, 3}, Shard{0});
  const auto key = key_of(op, {rows, others, 1});
  EXPECT_EQ(key, key_of(op, {others, rows, 2}));   // a number's value matters to no placement here
  EXPECT_NE(key, key_of(op, {rows, others, 1.0})); // its kind may to the dtype
  EXPECT_NE(key, key_of(op, {rows, placed({4, 3}, Replicate{}), 1}));
  EXPECT_NE(key, key_of(op, {rows, placed({4, 1}, Shard{0}), 1}));
  EXPECT_NE(key, key_of(op, {rows, placed({4, 3}, Shard{0}, at::kDouble), 1}));
  EXPECT_NE(key, key_of(op_of("sub", "Tensor"), {rows, others, 1}));
}

TEST(CallKey, HoldsStaticArguments) {
  const auto op = op_of("sum", "dim_IntList");
  const auto rows = placed({4, 3}, Shard{0});
  const auto of = [&](std::vector<int64_t> dims, bool keeps) {
    return key_of(op, {rows, std::move(dims), keeps, c10::IValue()});
  };
  EXPECT_EQ(of({0}, true), of({0}, true));
  EXPECT_NE(of({0}, true), of({1}, true));
  EXPECT_NE(of({0}, true), of({0}, false));
  EXPECT_NE(of({0}, true), of({0, 1}, true));
  const auto gelu = op_of("gelu");
  EXPECT_NE(key_of(gelu, {rows, "none"}), key_of(gelu, {rows, "tanh"}));
  EXPECT_EQ(key_of(gelu, {rows, "tanh"}), key_of(gelu, {rows, "tanh"}));
}

TEST(CallKey, AsksForTheSpecOfPlainTensors) {
  const auto op = op_of("add", "Tensor");
  const auto rows = placed({4, 3}, Shard{0});
  key_of(op, {rows, torch::ones({4, 3}), 1}, KeyState::kPlainTensor);
  const auto number = key_of(op, {rows, torch::tensor(2.0F), 1});
  EXPECT_EQ(number, key_of(op, {rows, torch::tensor(3.0F), 1}));
  EXPECT_NE(number, key_of(op, {rows, torch::tensor(3, torch::kDouble), 1})); // another dtype
}

TEST(VisitTensors, GoesThroughLists) {
  const auto schema = schema_of("index_put");
  const auto self = torch::zeros({3}), index = torch::tensor({1}), values = torch::ones({1});
  c10::List<std::optional<Tensor>> indices({std::optional(index), std::optional<Tensor>()});
  std::vector<c10::IValue> arguments{self, indices, values, false};
  std::vector<std::pair<Tensor, size_t>> seen;
  visit_tensors(schema, arguments, [&](const Tensor& tensor, size_t argument) { seen.emplace_back(tensor, argument); });
  ASSERT_EQ(seen.size(), 3);
  EXPECT_TRUE(seen[0].first.is_same(self) && seen[1].first.is_same(index) && seen[2].first.is_same(values));
  EXPECT_EQ(seen[1].second, 1);
  EXPECT_TRUE(any_tensor(schema, arguments, [&](const Tensor& tensor, size_t) { return tensor.is_same(index); }));

  const auto instead = torch::tensor({2});
  replace_tensors(schema, std::span(arguments), [&](const Tensor& tensor, size_t) -> std::optional<Tensor> {
    if (tensor.is_same(index)) return instead;
    return std::nullopt;
  });
  EXPECT_TRUE(arguments[1].toListRef()[0].toTensor().is_same(instead));
  EXPECT_TRUE(c10::IValue(indices).toListRef()[0].toTensor().is_same(index)); // the program's own list is as it was
  EXPECT_TRUE(arguments[0].toTensor().is_same(self));
}

TEST(ListPositions, RunACallForEachPosition) {
  const auto op = op_of("_foreach_add_", "ScalarList");
  const auto schema = read_schema(op.schema());
  const std::vector<Tensor> written{torch::zeros({2}), torch::zeros({}), torch::zeros({0})};
  torch::jit::Stack stack{c10::List<Tensor>(written), c10::List<at::Scalar>({1, 2.5, 3})};
  EXPECT_EQ(written_positions(schema, stack), 3);
  int calls = 0;
  run_by_position(op, schema, &stack, [&](torch::jit::Stack* call) {
    ++calls;
    EXPECT_EQ((*call)[0].toListRef().size(), 1);
    op.callBoxed(call);
  });
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(stack.empty());
  EXPECT_TENSORS_EQUAL(written[0], torch::ones({2}));
  EXPECT_TENSORS_EQUAL(written[1], torch::tensor(2.5F));
  EXPECT_EQ(written_positions(schema_of("_foreach_add", "Scalar"), {c10::List<Tensor>(written), 1}), 0); // it returns a list
}

/// Notes the origin of the calls in its backward.
struct Noted : torch::autograd::Function<Noted> {
  static inline CallOrigin seen = CallOrigin::kProgram;
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list gradients) {
    seen = internal::call_origin();
    return {gradients[0] * 2};
  }
};

TEST(CallOrigin, TellsTheProgramFromItsBackward) {
  EXPECT_EQ(internal::call_origin(), CallOrigin::kProgram);
  const auto leaf = torch::ones({2}, torch::requires_grad());
  const auto between = Noted::apply(leaf);
  CallOrigin in_hook = CallOrigin::kProgram;
  leaf.register_hook([&](const Tensor&) { in_hook = internal::call_origin(); });
  between.sum().backward();
  EXPECT_EQ(Noted::seen, CallOrigin::kFunction);
  EXPECT_NE(in_hook, CallOrigin::kProgram);
  EXPECT_FALSE(internal::is_forward(CallOrigin::kFunction) && !torch::GradMode::is_enabled());
  EXPECT_EQ(internal::call_origin(), CallOrigin::kProgram);
  EXPECT_TRUE(internal::is_forward(CallOrigin::kProgram));
}

TEST(CallOrigin, OfAFunctionThatRunsAgainIsTheSecondRun) {
  std::vector<CallOrigin> seen;
  const auto leaf = torch::ones({2}, torch::requires_grad());
  const auto squared = [&](const Tensor& x) {
    seen.push_back(internal::call_origin());
    return x.square();
  };
  recompute(squared, leaf).sum().backward();
  EXPECT_EQ(seen, (std::vector{CallOrigin::kProgram, CallOrigin::kSecondRun}));
  EXPECT_TRUE(internal::is_forward(CallOrigin::kSecondRun));
}

} // namespace
} // namespace tessera::testing::calls_test
