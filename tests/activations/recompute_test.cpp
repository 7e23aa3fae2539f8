#include <tessera/activations/recompute.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>

#include <tessera/tests/activations/small_mlp.h>
#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::recompute_test {
namespace {

using torch::Tensor;

TEST(Recompute, GivesTheGradientsOfAPlainCall) {
  for (const bool input_requires_grad : {true, false}) {
    for (const double dropout : {0.0, 0.5}) {
      auto mlp = make_mlp(dropout);
      const auto x = input(input_requires_grad);
      torch::manual_seed(3);
      const auto plain = mlp(x);
      plain.square().sum().backward();
      const auto drawn_after = torch::rand({1});
      const auto expected = gradients_of(*mlp, x);
      mlp->runs = 0;
      torch::manual_seed(3);
      const auto y = recompute(mlp, x);
      EXPECT_TRUE(torch::equal(y, plain));
      EXPECT_EQ(mlp->runs, 1);
      y.square().sum().backward();
      EXPECT_EQ(mlp->runs, 2);
      EXPECT_TRUE(torch::equal(torch::rand({1}), drawn_after)); // the second run leaves the generator as it finds it
      expect_same(gradients_of(*mlp, x), expected);
    }
  }
}

TEST(Recompute, TakesModulesPointersAndFunctions) {
  auto mlp = make_mlp();
  const auto x = input();
  mlp(x).sum().backward();
  const auto expected = gradients_of(*mlp, x);
  const auto check = [&](const Tensor& y) {
    mlp->runs = 0;
    y.sum().backward();
    EXPECT_EQ(mlp->runs, 1);
    expect_same(gradients_of(*mlp, x), expected);
  };
  const auto& constant = mlp;
  check(recompute(constant, x));
  check(recompute(*mlp, x));
  check(recompute(mlp.ptr(), x));
  check(recompute(mlp.get(), x));
  check(recompute([&](const Tensor& in) { return mlp(in); }, x));
  check(recompute([mlp](Tensor in) mutable { return mlp(std::move(in)); }, Tensor(x)));
  check(recompute([mlp, owned = std::make_unique<int>(1)](const Tensor& in) mutable { return mlp(in) * *owned; }, x));
  check(recompute([&] { return mlp(x); }));
  check(recompute(&MlpImpl::forward, mlp.ptr(), x));
  check(recompute(torch::nn::Sequential(mlp), x));
  std::function<Tensor(Tensor)> function = [&](const Tensor& in) { return mlp(in); };
  check(recompute({.name = "by name"}, function, x));
}

TEST(Recompute, KeepsATemporaryModuleAlive) {
  Tensor y, weight;
  {
    auto mlp = make_mlp();
    weight = mlp->up->weight;
    y = recompute(*mlp, input());
  }
  y.sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(Recompute, PassesAnyInputsAndOutputs) {
  const auto x = input(), w = input();
  const auto function = [](const std::vector<Tensor>& list, std::optional<Tensor> maybe, const std::optional<Tensor>& none,
                           const std::map<std::string, Tensor>& named, int64_t count, const std::string& text, Tensor undefined) {
    TORCH_CHECK(!none && !undefined.defined() && text == "text");
    auto sum = list[0].exp() * list[1].sin() + maybe->tanh() * static_cast<double>(count);
    return std::make_tuple(sum, std::vector<Tensor>{sum.exp(), named.at("w").cos()}, count, Tensor());
  };
  const auto run = [&](auto&& call) {
    auto [sum, list, count, undefined] = call();
    EXPECT_EQ(count, 3);
    EXPECT_FALSE(undefined.defined());
    (sum.sum() + list[0].sum() + list[1].square().sum()).backward();
    std::vector<Tensor> gradients{x.grad().clone(), w.grad().clone()};
    x.mutable_grad() = w.mutable_grad() = Tensor();
    return gradients;
  };
  const std::vector<Tensor> list{x, w};
  const std::map<std::string, Tensor> named{{"w", w}};
  const auto expected = run([&] { return function(list, x, std::nullopt, named, 3, "text", Tensor()); });
  const auto got = run([&] {
    return recompute(function, list, std::optional(x), std::optional<Tensor>(), named, int64_t{3}, std::string("text"), Tensor());
  });
  expect_same(got, expected);
}

/// Bytes of the tensors that a graph keeps, told by how many `input`-sized allocations live on.
TEST(Recompute, KeepsTheInputsAlone) {
  const auto x = input();
  std::weak_ptr<int> freed;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> inside;
  const auto y = recompute(
      [&](const Tensor& in) {
        auto a = in.exp(), b = a.sin();
        for (const auto& each : {a, b})
          inside.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(each.storage().unsafeGetStorageImpl()));
        return b.exp();
      },
      x);
  EXPECT_TRUE(inside[0].expired());
  EXPECT_TRUE(inside[1].expired());
  y.sum().backward();
  EXPECT_TRUE(torch::allclose(x.grad(), x.exp().sin().exp() * x.exp().cos() * x.exp()));
  for (const auto& each : inside) EXPECT_TRUE(each.expired());
}

TEST(Recompute, WithoutGradModeIsAPlainCall) {
  auto mlp = make_mlp();
  const auto x = input();
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(recompute(mlp, x).requires_grad());
  }
  const c10::InferenceMode inference;
  EXPECT_TRUE(recompute(mlp, x).is_inference());
}

TEST(Recompute, Nests) {
  std::vector<Mlp> mlps{make_mlp(0.5), make_mlp(0.5), make_mlp(0.5), make_mlp(0.5)};
  torch::nn::ModuleList all;
  for (auto& each : mlps) all->push_back(each);
  const auto x = input();
  const auto run = [&](bool recomputes) {
    const auto each = [&](Mlp& mlp, const Tensor& in) { return recomputes ? recompute(mlp, in) : mlp(in); };
    const auto half = [&](size_t begin, const Tensor& in) { return each(mlps[begin + 1], each(mlps[begin], in).tanh()).sin(); };
    const auto whole = [&](const Tensor& in) {
      if (!recomputes) return half(2, half(0, in)).exp();
      return recompute(half, size_t{2}, recompute(half, size_t{0}, in)).exp();
    };
    torch::manual_seed(5);
    const auto y = recomputes ? recompute(whole, x) : whole(x);
    y.square().sum().backward();
    return gradients_of(*all, x);
  };
  const auto expected = run(false);
  expect_same(run(true), expected);
  for (const auto& each : mlps) EXPECT_LE(each->runs, 5); // a run in forward, one for each level around it, and the plain one
}

TEST(Recompute, WorksWithEveryKindOfBackward) {
  auto mlp = make_mlp();
  const auto x = input();
  const auto weight = mlp->up->weight;
  const auto loss = [&](bool recomputes) { return (recomputes ? recompute(mlp, x) : mlp(x)).square().sum(); };
  // retain_graph
  const auto retained = loss(true), plain = loss(false);
  for (int i = 0; i < 3; ++i) retained.backward({}, /*retain_graph=*/i < 2);
  const auto thrice = gradients_of(*mlp, x);
  for (int i = 0; i < 3; ++i) plain.backward({}, /*retain_graph=*/i < 2);
  expect_same(thrice, gradients_of(*mlp, x));
  EXPECT_THROWS_WITH(retained.backward(), "Trying to backward through the graph a second time");
  // grad, and backward with inputs
  const auto grad = [&](bool recomputes) { return torch::autograd::grad({loss(recomputes)}, {weight, x}); };
  expect_same(grad(true), grad(false));
  loss(true).backward({}, false, false, std::vector<Tensor>{weight});
  EXPECT_TRUE(torch::equal(weight.grad(), grad(false)[0]));
  EXPECT_FALSE(mlp->down->weight.grad().defined());
  gradients_of(*mlp, x);
  // create_graph
  const auto twice = [&](bool recomputes) {
    const auto first = torch::autograd::grad({loss(recomputes)}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    first.square().sum().backward();
    return gradients_of(*mlp, x);
  };
  const auto expected = twice(false), got = twice(true);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::allclose(got[i], expected[i], 1e-6, 1e-7)) << i;
}

TEST(Recompute, RunsABackwardInsideOfTheFunction) {
  const auto x = input();
  const auto penalty = [](const Tensor& in) {
    const auto y = in.exp().sum();
    return torch::autograd::grad({y}, {in}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0].square().sum();
  };
  const auto expected = torch::autograd::grad({penalty(x)}, {x})[0];
  EXPECT_TRUE(torch::equal(torch::autograd::grad({recompute(penalty, x)}, {x})[0], expected));
}

/// Amid the first run: with a module's buffers, with a run that is compared to its end, and with a policy.
TEST(Recompute, RunsABackwardInsideOfAModule) {
  struct ForceImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) {
      const auto energy = (x * table).exp().sum();
      count.add_(1);
      return torch::autograd::grad({energy}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0] * table;
    }
    Tensor table = register_buffer("table", torch::ones({6})), count = register_buffer("count", torch::zeros({}));
  };
  const auto x = input();
  const auto expected = torch::autograd::grad({ForceImpl().forward(x).square().sum()}, {x})[0];
  RecomputeOptions with_policy;
  with_policy.keep = [](const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue>) {
    return op.operator_name().name == "aten::exp";
  };
  for (const auto& options : {RecomputeOptions{}, RecomputeOptions{.early_stop = false}, with_policy}) {
    const auto force = std::make_shared<ForceImpl>();
    const auto loss = recompute(options, force, x).square().sum();
    EXPECT_EQ(force->count.item<double>(), 1);
    EXPECT_TENSORS_CLOSE(torch::autograd::grad({loss}, {x})[0], expected, 1e-5, 1e-5);
    EXPECT_EQ(force->count.item<double>(), 1);
  }
}

/// It draws, and leaves the generator as it found it.
TEST(Recompute, FindsTheRandomNumbersOfAFunctionThatPutsTheStateBack) {
  const auto drops = [](const Tensor& x) {
    auto generator = at::globalContext().defaultGenerator(at::kCPU);
    const auto state = generator.get_state();
    auto y = torch::dropout(x.exp(), 0.5, /*train=*/true);
    generator.set_state(state);
    return y;
  };
  const auto x = input();
  torch::manual_seed(3);
  const auto expected = torch::autograd::grad({drops(x).sum()}, {x})[0];
  torch::manual_seed(3);
  const auto y = recompute(drops, x);
  torch::rand({5});
  EXPECT_TENSORS_EQUAL(torch::autograd::grad({y.sum()}, {x})[0], expected);
}

TEST(Recompute, KeepsAutocast) {
  auto mlp = make_mlp();
  const auto x = input();
  const auto run = [&](bool recomputes) {
    auto scope = std::make_optional<AutocastScope>(at::kCPU);
    const auto y = recomputes ? recompute(mlp, x) : mlp(x);
    scope.reset();
    y.square().sum().backward();
    return gradients_of(*mlp, x);
  };
  expect_same(run(true), run(false));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

struct OwnFunction : torch::autograd::Function<OwnFunction> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x, x.exp()});
    return x.exp() * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto x = context->get_saved_variables()[0], e = context->get_saved_variables()[1]; // asked for twice
    return {gradients[0] * (e + x * e)};
  }
};

TEST(Recompute, WorksWithFunctionsOfAProgram) {
  const auto x = input();
  const auto function = [](const Tensor& in) { return OwnFunction::apply(in.sin()).cos(); };
  const auto expected = torch::autograd::grad({function(x).sum()}, {x})[0];
  EXPECT_TRUE(torch::equal(torch::autograd::grad({recompute(function, x).sum()}, {x})[0], expected));
}

TEST(Recompute, KeepsTheResultsThatAPolicyChooses) {
  const auto run = [](const RecomputeOptions& options, double dropout) {
    auto mlp = make_mlp(dropout);
    const auto x = input();
    torch::manual_seed(3);
    recompute(options, mlp, x).square().sum().backward();
    return gradients_of(*mlp, x);
  };
  int asked = 0;
  RecomputeOptions options;
  options.keep = [&](const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue>) {
    ++asked;
    const auto& name = op.operator_name().name;
    return name == "aten::addmm" || name == "aten::bernoulli" || name == "aten::gelu";
  };
  for (const double dropout : {0.0, 0.5}) {
    asked = 0;
    const auto expected = run({}, dropout);
    expect_same(run(options, dropout), expected);
    EXPECT_GT(asked, 0);
  }
  int64_t computed = 0;
  RecomputeOptions every_second;
  every_second.keep = [&](const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue>) {
    return op.operator_name().name == "aten::addmm" && ++computed % 2 == 0;
  };
  expect_same(run(every_second, 0.0), run({}, 0.0));
  EXPECT_EQ(computed, 2); // the second run does not ask
}

/// The kernel of an embedding calls index_select: the second run, which has the embedding's result, does not come to it.
TEST(Recompute, CountsNoOperatorsThatAKernelCalls) {
  RecomputeOptions options;
  options.keep = [](const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue>) {
    const auto& name = op.operator_name().name;
    return name == "aten::embedding" || name == "aten::index_select";
  };
  const auto table = torch::randn({4, 6}).requires_grad_(true), x = input();
  const auto rows = torch::tensor({3, 1, 0, 2}), ids = torch::tensor({1, 3, 2, 0});
  const auto function = [&](const Tensor& in) {
    const auto embedded = torch::embedding(table, ids);
    return (in.sin().index_select(0, rows) * embedded).exp();
  };
  const auto expected = torch::autograd::grad({function(x).sum()}, {x, table});
  const auto actual = torch::autograd::grad({recompute(options, function, x).sum()}, {x, table});
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TENSORS_EQUAL(actual[i], expected[i]);
}

TEST(Recompute, KeepsResultsThatTheFunctionWritesLater) {
  RecomputeOptions options;
  options.keep = [](const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue>) {
    return op.operator_name().name == "aten::exp" || op.operator_name().name == "aten::mm";
  };
  const auto x = input().view({2, 2, 6}).detach().requires_grad_();
  torch::nn::Linear layer(6, 6); // adds its bias in place to what it views of aten::mm
  const auto function = [&](const Tensor& in) { return layer(in.sin().exp()).relu_().cos().exp(); };
  const auto expected = torch::autograd::grad({function(x).square().sum()}, {x})[0];
  const auto y = recompute(options, function, x);
  for (int i = 0; i < 2; ++i)
    EXPECT_TRUE(torch::equal(torch::autograd::grad({y.square().sum()}, {x}, {}, /*retain_graph=*/true)[0], expected));
}

TEST(Recompute, LaysWhatItKeepsInAPlace) {
  int64_t kept = 0, bytes = 0;
  RecomputeOptions options;
  options.place = [&](const Tensor& tensor) -> std::function<Tensor()> {
    ++kept;
    bytes += static_cast<int64_t>(tensor.nbytes());
    return [copy = tensor.to(torch::kDouble)] { return copy.to(torch::kFloat); };
  };
  auto mlp = make_mlp();
  const auto x = input();
  recompute(options, mlp, x).square().sum().backward();
  const auto got = gradients_of(*mlp, x);
  EXPECT_EQ(kept, 1);
  EXPECT_EQ(bytes, x.nbytes());
  mlp(x).square().sum().backward();
  expect_same(got, gradients_of(*mlp, x));
}

// Differences between the runs.

/// A function that does `second` in all runs but the first.
template <typename First, typename Second>
auto changing(const First& first, const Second& second) {
  return [=, runs = 0](const Tensor& x) mutable { return runs++ == 0 ? first(x) : second(x); };
}

void expect_error(const RecomputeOptions& options, const std::function<Tensor(const Tensor&)>& first,
                  const std::function<Tensor(const Tensor&)>& second, const std::string& text) {
  const auto x = input();
  const auto y = recompute(options, changing(first, second), x);
  EXPECT_THROWS_WITH(y.sum().backward(), text);
  recompute([](const Tensor& in) { return in.exp(); }, x).sum().backward(); // nothing is left behind
  EXPECT_TRUE(torch::equal(x.grad(), x.exp()));
}

TEST(Recompute, NamesAFunctionWhoseSecondRunDiffers) {
  const auto exp = [](const Tensor& x) { return x.exp(); };
  const auto twice = [](const Tensor& x) { return x.exp().exp(); };
  const RecomputeOptions to_the_end{.name = "my block", .early_stop = false};
  expect_error(
      {.name = "my block"}, twice, exp,
      "recompute of my block: its second run differs from the first on rank 0: autograd saved 2 tensors then, and only 1 "
      "now");
  expect_error(to_the_end, exp, twice,
               "recompute of my block: its second run differs from the first on rank 0: autograd saved 1 "
               "tensors then, and saves more now");
  expect_error(
      {.name = "shapes"}, exp, [](const Tensor& x) { return x.narrow(0, 0, 2).exp(); },
      "recompute of shapes: its second run differs from the first on rank 0: saved tensor 1 of 1 was Float [4, 6] on cpu, "
      "and is Float [2, 6] on cpu now");
  expect_error(
      {.name = "dtypes"}, exp, [](const Tensor& x) { return x.to(torch::kDouble).exp(); },
      "was Float [4, 6] on cpu, and is Double [4, 6] on cpu now");
  expect_error(
      to_the_end, exp, [](const Tensor& x) { return x.exp().view({24}); },
      "output 1 was Float [4, 6] on cpu, and is Float [24] on cpu now");
  expect_error(
      {.name = "throws"}, exp, [](const Tensor& x) { return x.view({5}); }, "in the second run of recompute of throws");
}

TEST(Recompute, WithoutItsRandomStateRefusesToDraw) {
  auto mlp = make_mlp(0.5);
  EXPECT_THROWS_WITH(recompute({.keep_rng_state = false}, mlp, input()),
                     "recompute of tessera::testing::MlpImpl drew random numbers");
  mlp->eval();
  recompute({.keep_rng_state = false}, mlp, input()).sum().backward();
}

TEST(Recompute, NamesAnInputThatWasChangedInPlace) {
  const auto x = input().exp();
  const auto y = recompute(
      {.name = "block"}, [](const Tensor& in) { return in.exp(); }, x);
  x.detach().add_(1);
  EXPECT_THROWS_WITH(y.sum().backward(), "modified by an inplace operation");
  try {
    y.sum().backward();
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("in the second run of recompute of block"));
  }
}

TEST(Recompute, NamesWhatWasChangedBetweenTheRuns) {
  auto mlp = make_mlp();
  const auto write = [](Tensor tensor) {
    const torch::NoGradGuard no_grad;
    tensor.mul_(2);
  };
  const auto y = recompute({.name = "mlp"}, mlp, input());
  write(mlp->down->bias); // which autograd does not save
  EXPECT_THROWS_WITH(y.sum().backward(), "the parameter down.bias was modified by an inplace operation since the forward");
  const auto z = recompute(
      {.name = "lambda"}, [&](const Tensor& x) { return mlp(x); }, input());
  write(mlp->up->weight);
  EXPECT_THROWS_WITH(z.sum().backward(),
                     "a tensor that autograd saved (Float [6, 12] on cpu) was modified by an inplace operation");
  // what the function itself writes: after the save, as for autograd, and before it
  const auto after = recompute([](const Tensor& x) { return x.exp().add_(1).sin(); }, input());
  EXPECT_THROWS_WITH(after.sum().backward(), "was modified by an inplace operation later in the function");
  const auto scratch = torch::zeros({4, 6});
  const auto x = input();
  const auto before = recompute([&](const Tensor& in) { return in * scratch.copy_(in.detach()).mul_(2); }, x);
  before.sum().backward({}, /*retain_graph=*/true);
  before.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), 4 * x));
}

TEST(Recompute, AnExceptionInTheFunctionIsTheCallers) {
  const auto x = input();
  EXPECT_THROWS_WITH(recompute([](const Tensor& in) { return in.exp().view({5}); }, x), "shape '[5]' is invalid");
  const auto y = x.exp();
  y.sum().backward(); // autograd keeps its own tensors again
  EXPECT_TRUE(torch::equal(x.grad(), y));
}

TEST(Recompute, AFunctionThatCatchesEverythingRunsToItsEnd) {
  const auto x = input();
  int caught = 0;
  const auto y = recompute(
      [&](const Tensor& in) {
        try {
          return in.exp().sin();
        } catch (...) {
          ++caught;
          return in.exp().sin().cos();
        }
      },
      x);
  y.sum().backward();
  EXPECT_EQ(caught, 1);
  EXPECT_TRUE(torch::allclose(x.grad(), x.exp().cos() * x.exp()));
}

} // namespace
} // namespace tessera::testing::recompute_test
