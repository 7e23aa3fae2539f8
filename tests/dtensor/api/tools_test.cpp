#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ThreadLocalState.h>
#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/distribute_module.h>
#include <tessera/dtensor/factories.h>
#include <tessera/dtensor/local_map.h>
#include <tessera/dtensor/register_sharding.h>
#include <tessera/dtensor/strict_sharding.h>
#include <torch/library.h>

#include <functional>
#include <thread>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::tools_test {
namespace {

using at::Tensor;

TEST(Factories, EqualPlainTensorsForEveryPlacement) {
  const auto mesh = line_mesh();
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {1}, {0, 2}, {2, 3, 4}}) {
    auto placements = whole_placements(sizes, mesh.size());
    for (const auto& partial : partials()) placements.push_back(partial);
    for (const auto& placement : placements) {
      SCOPED_TRACE(to_string(placement));
      EXPECT_TENSORS_EQUAL(zeros(sizes, mesh, {placement}).full_tensor(), torch::zeros(sizes));
      EXPECT_TENSORS_CLOSE(full(sizes, 2.5, mesh, {placement}).full_tensor(), torch::full(sizes, 2.5));
      if (is_partial(placement)) {
        torch::manual_seed(2);
        const auto drawn = torch::rand(sizes);
        torch::manual_seed(2);
        EXPECT_TENSORS_CLOSE(rand(sizes, mesh, {placement}).full_tensor(), drawn);
        continue;
      }
      EXPECT_TENSORS_EQUAL(ones(sizes, mesh, {placement}, torch::kLong).full_tensor(), torch::ones(sizes, torch::kLong));
      torch::manual_seed(2);
      const auto expected = torch::randn(sizes), uniform = torch::rand(sizes);
      torch::manual_seed(2);
      EXPECT_TENSORS_EQUAL(randn(sizes, mesh, {placement}).full_tensor(), expected);
      EXPECT_TENSORS_EQUAL(rand(sizes, mesh, {placement}).full_tensor(), uniform);
    }
  }
  EXPECT_TRUE(zeros({2}, mesh, {Replicate{}}, at::TensorOptions().requires_grad(true)).is_leaf());
  EXPECT_TRUE(zeros({2}, mesh, {Replicate{}}, at::TensorOptions().requires_grad(true)).requires_grad());
  EXPECT_EQ(empty({4, 2}, mesh, {Shard{0}}).sizes(), (std::vector<int64_t>{4, 2}));
}

TEST(LocalMap, RunsOnTheParts) {
  const auto mesh = line_mesh();
  const auto whole = torch::arange(24, torch::kDouble).view({8, 3});
  const auto weight = torch::arange(6, torch::kDouble).view({3, 2});
  const auto multiply = local_map(
      [](const std::vector<Tensor>& t) {
        return std::vector<Tensor>{t[0].mm(t[1]), t[0].sum(0)};
      },
      {{Shard{0}}, {Partial{}}}, {{Shard{0}}, {Replicate{}}}, {{8, 2}, {3}});
  auto x = make(whole, mesh, {Replicate{}});
  x.set_requires_grad(true);
  const auto results = multiply({x, make(weight, mesh, {Shard{1}})});
  EXPECT_TENSORS_CLOSE(results[0].full_tensor().detach(), whole.mm(weight));
  EXPECT_TENSORS_CLOSE(results[1].full_tensor().detach(), whole.sum(0));
  results[0].full_tensor().sum().backward();
  EXPECT_TENSORS_CLOSE(DTensor(x.grad()).full_tensor(), torch::ones({8, 2}, torch::kDouble).mm(weight.t()));
  EXPECT_THROWS_WITH(multiply({x}), "local_map: 1 arguments for 2 input placements");
  EXPECT_THROWS_WITH(local_map({}, {{Shard{0}}}, {{Shard{0}}}), "local_map: the function is empty");
  const auto nothing = [](const std::vector<Tensor>&) { return std::vector<Tensor>(1); };
  EXPECT_THROWS_WITH(local_map(nothing, {{Shard{0}}}, {{Shard{0}}})({x}), "local_map: output 0 of the function is undefined");
}

TEST(LocalMap, MovesNoArgumentInsideStrictSharding) {
  const auto mesh = line_mesh();
  const auto x = make(torch::arange(24).view({8, 3}), mesh, {Shard{1}});
  const auto negate = [&](const Placement& on) {
    return local_map([](const std::vector<Tensor>& t) { return std::vector<Tensor>{-t[0]}; }, {{on}}, {{on}}, {{8, 3}})({x})[0];
  };
  const StrictSharding strict;
  EXPECT_TENSORS_EQUAL(negate(Shard{-1}).full_tensor(), -torch::arange(24).view({8, 3}));
  EXPECT_THROWS_WITH(negate(Replicate{}), "local_map: argument 0 has the placements (Shard(1)), not (Replicate())");
}

/// Each rank has the gradient of the weight from its own part of the batch.
TEST(LocalMap, SumsTheGradientsOfAReplicatedInput) {
  const auto mesh = line_mesh();
  const auto batch = torch::arange(24, torch::kDouble).view({8, 3}), weight = torch::arange(6, torch::kDouble).view({3, 2});
  const auto multiply = [](const std::vector<Tensor>& t) { return std::vector<Tensor>{t[0].mm(t[1])}; };
  const auto layer = local_map(multiply, {{Shard{0}}}, {{Shard{0}}, {Replicate{}}}, {{8, 2}}, {{Shard{0}}, {Partial{}}});
  auto expected = weight.clone().set_requires_grad(true);
  batch.mm(expected).square().sum().backward();
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})}) {
    auto w = make(weight, mesh, {placement});
    w.set_requires_grad(true);
    layer({make(batch, mesh, {Shard{0}}), w})[0].square().sum().backward();
    EXPECT_EQ(DTensor(w.grad()).placements()[0], placement);
    EXPECT_TENSORS_CLOSE(DTensor(w.grad()).full_tensor(), expected.grad());
  }
  EXPECT_THROWS_WITH(local_map(multiply, {{Shard{0}}}, {{Shard{0}}, {Replicate{}}}, {}, {{Shard{0}}}),
                     "2 inputs, but 1 input_gradients");
  if (mesh.size() > 1) {
    EXPECT_THROWS_WITH(to_local(make(weight, mesh, {Replicate{}}), Placements{Shard{0}}),
                       "has not the shape of this rank's part");
  }
}

TEST(DistributeModule, TrainsLikeThePlainOne) {
  const auto mesh = line_mesh();
  const auto build = [] {
    torch::manual_seed(4);
    return torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::ReLU(), torch::nn::Linear(8, 3));
  };
  auto plain = build(), sharded = build();
  const auto handle = sharded->parameters()[0];
  distribute_module(*sharded, mesh, [](const std::string& name, const Tensor&) -> Placements {
    if (name == "0.weight" || name == "0.bias") return {Shard{0}};
    if (name == "2.weight") return {Shard{1}};
    return {Replicate{}};
  });
  EXPECT_TRUE(is_dtensor(handle));
  const auto input = torch::randn({4, 6});
  const auto x = make(input, mesh, {Replicate{}});
  torch::optim::SGD first(plain->parameters(), 0.1), second(sharded->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    first.zero_grad();
    second.zero_grad();
    const auto expected = plain->forward(input).square().mean();
    const auto actual = sharded->forward(Tensor(x)).square().mean();
    EXPECT_TENSORS_CLOSE(DTensor(actual.detach()).full_tensor(), expected.detach());
    expected.backward();
    actual.backward();
    first.step();
    second.step();
  }
  EXPECT_EQ(DTensor(sharded->parameters()[2]).placements(), Placements{Shard{1}});
  EXPECT_TENSORS_CLOSE(DTensor(sharded->parameters()[2].detach()).full_tensor(), plain->parameters()[2].detach());
}

/// A plain one beside a parameter that is a DTensor would be an error of the next backward.
TEST(DistributeModule, DropsGradients) {
  const auto mesh = line_mesh();
  torch::nn::Linear layer(3, 2);
  layer->weight.mutable_grad() = torch::ones({2, 3});
  distribute_module(*layer, mesh);
  EXPECT_FALSE(layer->weight.grad().defined());
  layer->forward(Tensor(make(torch::ones({4, 3}), mesh, {Replicate{}}))).sum().backward();
  EXPECT_TENSORS_EQUAL(whole_of(layer->weight.grad()), torch::full({2, 3}, 4.0F));
}

Tensor scaled_product(const Tensor& a, const Tensor& b, double scale) { return a.mm(b) * scale; }

TEST(RegisterSharding, ServesAnOperatorOfTheProgram) {
  static auto library = torch::Library(torch::Library::DEF, "tessera_test", std::nullopt, __FILE__, __LINE__);
  static bool defined = false;
  if (!defined) {
    EXPECT_THROWS_WITH(register_sharding("tessera_test::scaled_product", "mk,kn->mn"),
                       "there is no operator tessera_test::scaled_product");
    library.def("scaled_product(Tensor a, Tensor b, float scale) -> Tensor");
    library.impl("scaled_product", torch::dispatch(c10::DispatchKey::CPU, &scaled_product));
    library.def("composite(Tensor a, Tensor b, float scale) -> Tensor", &scaled_product);
    EXPECT_THROWS_WITH(
        register_sharding("tessera_test::scaled_product", "mk->m"),
        "has 1 inputs and 1 results, but tessera_test::scaled_product has 2 tensor arguments and 1 tensor results");
    EXPECT_THROWS_WITH(register_sharding("tessera_test::composite", "mk,kn->mn"), "was defined with its function");
    register_sharding("tessera_test::scaled_product", "mk,kn->mn", "k");
    defined = true;
  }
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("tessera_test::scaled_product", "")
                      .typed<Tensor(const Tensor&, const Tensor&, double)>();
  const auto mesh = line_mesh();
  torch::manual_seed(6);
  const auto a = torch::randn({5, 4}, torch::kDouble), b = torch::randn({4, 3}, torch::kDouble);
  for (const auto& p : shards({5, 4})) {
    for (const auto& q : shards({4, 3})) {
      EXPECT_TENSORS_CLOSE(DTensor(op.call(make(a, mesh, {p}), make(b, mesh, {q}), 2.0)).full_tensor(), a.mm(b) * 2);
    }
  }
  const LogRedistributions log;
  if (mesh.size() == 2 || mesh.size() == 4) { // no rank without a part
    EXPECT_EQ(DTensor(op.call(make(a, mesh, {Shard{1}}), make(b, mesh, {Shard{0}}), 2.0)).placements()[0], Placement(Partial{}));
    EXPECT_TRUE(log.records().empty());
  }
  EXPECT_THROWS_WITH(register_sharding("tessera_test::scaled_product", "mk,kn->mn"),
                     "register_sharding: tessera_test::scaled_product has a rule already");
  EXPECT_THROWS_WITH(register_sharding("aten::mm", "mk,kn->mn"), "'aten::mm' is not the name of an operator outside aten");
  EXPECT_THROWS_WITH(register_sharding("my::op", "mk"), "the pattern 'mk' of my::op has no '->'");
  EXPECT_THROWS_WITH(register_sharding("my::op", "m?->m"), "may hold letters, '*', '~', '...', ',' and '->' only");
  EXPECT_THROWS_WITH(register_sharding("my::op", "m\xC3\xA4->m"), "may hold letters");
  for (const auto* term : {"...~", "m~n~", "mm", ".", "m-n"}) {
    EXPECT_THROWS_WITH(register_sharding("my::op", std::string(term) + ",k->k"),
                       c10::str("the term '", term, "' of the pattern '", term, ",k->k' of my::op must be letters, each once"));
  }
  EXPECT_THROWS_WITH(register_sharding("my::op", "m->m->m"), "the term 'm->m' of the pattern 'm->m->m'");
  EXPECT_THROWS_WITH(register_sharding("my::op", "mk->m", "z"),
                     "'z' is to be summed, but is no letter of the pattern 'mk->m' of my::op");
}

TEST(Picture, ShowsEachRank) {
  const auto mesh = line_mesh();
  const auto n = mesh.size();
  const auto text = picture(zeros({2 * n, 3}, mesh, {Shard{0}}));
  EXPECT_NE(
      text.find("\nrank " + std::to_string(n - 1) + ": [" + std::to_string(2 * n - 2) + ":" + std::to_string(2 * n) + ", 0:3]"),
      std::string::npos)
      << text;
  EXPECT_NE(picture(zeros({2}, mesh, {Partial{}})).find("rank 0: [0:2] partial sum"), std::string::npos);
  EXPECT_THROWS_WITH(picture(torch::ones({2})), "picture: this tensor is not a DTensor");
}

/// On a thread that takes over what autograd gives its own threads.
void run_as_backward(const std::function<void()>& call) {
  const at::ThreadLocalState state;
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(state);
    call();
  }).join();
}

TEST(Scopes, HoldOnTheThreadsOfABackward) {
  const auto mesh = line_mesh();
  const auto tensor = distribute_tensor(torch::ones({4, 3}), mesh, {Shard{0}});
  const LogRedistributions log;
  run_as_backward([&] { tensor.redistribute({Replicate{}}); });
  EXPECT_EQ(log.records().size(), world_size() == 1 ? 0u : 1u); // one rank has the whole
  {
    const ImplicitReplication scope;
    run_as_backward([&] {
      EXPECT_TENSORS_EQUAL(DTensor(tensor + torch::ones({4, 3}, mesh.device())).full_tensor(), torch::full({4, 3}, 2.0));
    });
  }
  run_as_backward([&] { EXPECT_THROWS_WITH(tensor + torch::ones({4, 3}), "cannot be mixed with DTensors"); });
  const StrictSharding strict;
  run_as_backward([&] { EXPECT_THROWS_WITH(torch::pdist(tensor), "aten::_pdist_forward: no sharding rule for this operator"); });
}

TEST(Scopes, StrictShardingComparesTheGeneratorsOfTheRanks) {
  const auto mesh = line_mesh();
  const auto own_seed = static_cast<uint64_t>(process_context().rank()) + 3;
  for (const auto& placement : {Placement(Replicate{}), Placement(Shard{0})}) {
    const auto tensor = make(torch::ones({40, 3}), mesh, {placement});
    torch::manual_seed(3);
    const auto expected = DTensor(torch::dropout(tensor, 0.5, true)).full_tensor();
    torch::manual_seed(own_seed);
    torch::dropout(tensor, 0.5, true);
    const StrictSharding strict;
    torch::manual_seed(3);
    EXPECT_TENSORS_EQUAL(DTensor(torch::dropout(tensor, 0.5, true)).full_tensor(), expected);
    torch::manual_seed(own_seed);
    if (mesh.size() > 1) {
      EXPECT_THROWS_WITH(torch::dropout(tensor, 0.5, true), "the random generator of rank 1 has another state than rank 0's");
    }
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(9);
    if (tests_the_cpu()) tensor.clone().normal_(0, 1, generator); // the same on every rank
  }
  torch::manual_seed(3);
}

} // namespace
} // namespace tessera::testing::tools_test
