// Views of parameters that are taken without grad mode: DTensors beside gradients, the whole beside activations.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/dtensor/debug.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/reshard_parameters.h>
#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::parameter_view_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;
using torch::indexing::Slice;

constexpr int64_t kRows = 5, kColumns = 6; // which no number of ranks but one divides

/// Parameters of 0, 1 and odd numbers of elements. Its forward uses views of them.
struct ViewedImpl : nn::Module {
  explicit ViewedImpl(const torch::Device& device) {
    torch::manual_seed(3);
    const auto make = [&](const char* name, c10::IntArrayRef sizes) {
      return register_parameter(name, torch::randn(sizes).to(device));
    };
    w = make("w", {kRows, kColumns});
    v = make("v", {kRows});
    one = make("one", {1});
    none = make("none", {0, kColumns});
    cube = make("cube", {3, 2, kColumns});
    scalar = make("scalar", {});
  }
  Tensor forward(const Tensor& x) {
    const auto parts = cube.unbind(0);
    auto y = x.mm(w.t()) * v.unsqueeze(0) + v.view({1, kRows}).expand({x.size(0), kRows});
    y = y + x.mm(parts[1].t()).sum() + x.mm(cube.flatten(0, 1).permute({1, 0})).mean() + x.mm(w.chunk(2)[0].t()).sum(1, true);
    return y * one.squeeze() + torch::cat({x.mean().view({1}), none.flatten()}) * scalar.view({1});
  }
  Tensor w, v, one, none, cube, scalar;
};
TORCH_MODULE(Viewed);

Viewed make_viewed(const torch::Device& device = twin_device()) { return Viewed(device); }

Viewed sharded_viewed(const Strategy& strategy) {
  auto model = make_viewed();
  strategy.replicates ? replicate(*model, strategy.mesh(), strategy.options)
                      : fully_shard(model, strategy.mesh(), strategy.options);
  return model;
}

/// The same on all ranks, so that gradients are those of the twin.
Tensor input(const torch::Device& device) {
  torch::manual_seed(4);
  return torch::randn({4, kColumns}).to(device);
}

void train(Viewed& model, const torch::Device& device) { model->forward(input(device)).square().mean().backward(); }

struct View {
  std::string name;
  std::function<Tensor(const Tensor&)> of; ///< a tensor that has the shape of `w`
};

std::vector<View> views_of_all() {
  return {
      {"t", [](const Tensor& w) { return w.t(); }},
      {"flatten", [](const Tensor& w) { return w.flatten(); }},
      {"view", [](const Tensor& w) { return w.view({-1}); }},
      {"view in other rows",
       [](const Tensor& w) {
         return w.view({kColumns, kRows});
       }},
      {"reshape",
       [](const Tensor& w) {
         return w.reshape({3, 2, kRows});
       }},
      {"unsqueeze", [](const Tensor& w) { return w.unsqueeze(1); }},
      {"permute",
       [](const Tensor& w) {
         return w.permute({1, 0});
       }},
  };
}

std::vector<View> views_of_parts() {
  return {
      {"slice of rows", [](const Tensor& w) { return w.slice(0, 1, 4); }},
      {"slice of columns",
       [](const Tensor& w) {
         return w.index({Slice(), Slice(1, 6, 2)});
       }},
      {"row", [](const Tensor& w) { return w[2]; }},
      {"element", [](const Tensor& w) { return w[4][5]; }},
      {"no rows", [](const Tensor& w) { return w.narrow(0, 5, 0); }},
      {"chunk", [](const Tensor& w) { return w.chunk(2, 1)[1]; }},
      {"split",
       [](const Tensor& w) {
         return w.split_with_sizes({2, 3})[1];
       }},
      {"unbind", [](const Tensor& w) { return w.unbind(1)[3]; }},
      {"diagonal", [](const Tensor& w) { return w.diagonal(); }},
      {"expand",
       [](const Tensor& w) {
         return w.unsqueeze(0).expand({2, kRows, kColumns});
       }},
      {"unflatten",
       [](const Tensor& w) {
         return w.unflatten(1, {2, 3}).movedim(1, 0);
       }},
      {"of detach", [](const Tensor& w) { return w.detach().t(); }},
      {"of data", [](const Tensor& w) { return w.data().flatten(); }},
      {"detach of", [](const Tensor& w) { return w.t().detach(); }},
      {"chain",
       [](const Tensor& w) {
         return w.t().unsqueeze(0).transpose(1, 2).squeeze(0)[1].view({2, 3});
       }},
      {"contiguous already", [](const Tensor& w) { return w.contiguous().view({-1}); }},
  };
}

std::vector<View> views() {
  auto all = views_of_all();
  for (auto& view : views_of_parts()) all.push_back(std::move(view));
  return all;
}

struct Use {
  std::string name;
  std::function<Tensor(const Tensor& view, const Tensor& gradient)> of; ///< the same view of both
};

std::vector<Use> uses() {
  return {
      {"product", [](const Tensor& w, const Tensor& g) { return w * g; }},
      {"dot", [](const Tensor& w, const Tensor& g) { return torch::dot(w.clone().flatten(), g.clone().flatten()); }},
      {"cosine similarity",
       [](const Tensor& w, const Tensor& g) { return torch::cosine_similarity(w.unsqueeze(0), g.unsqueeze(0), -1); }},
      {"projection",
       [](const Tensor& w, const Tensor& g) {
         const auto direction = w / (w.norm() + 1);
         return g - direction * (direction * g).sum();
       }},
      {"list", [](const Tensor& w, const Tensor& g) { return at::_foreach_add(std::vector{w}, std::vector{g}, 2)[0]; }},
      {"alone", [](const Tensor& w, const Tensor& g) { return w.exp().sum() + 0 * g.sum(); }},
      {"what is computed", [](const Tensor& w, const Tensor& g) { return (1 + w) * g; }},
  };
}

/// Under each of the modes without grad mode.
template <typename Run>
void without_grad(const Run& run) {
  for (const bool inference : {false, true}) {
    SCOPED_TRACE(inference ? "inference" : "no grad");
    const torch::NoGradGuard no_grad;
    std::optional<c10::InferenceMode> mode;
    if (inference) mode.emplace();
    run();
  }
}

TEST(ParameterView, MeetsGradientsAsADTensor) {
  for (const auto& strategy : strategies()) {
    auto plain = make_viewed(), model = sharded_viewed(strategy);
    train(plain, twin_device());
    train(model, test_device());
    without_grad([&] {
      for (const auto& view : views()) {
        for (const auto& use : uses()) {
          SCOPED_TRACE(strategy.name + ": " + view.name + ", " + use.name);
          const auto viewed = view.of(model->w);
          EXPECT_TRUE(is_dtensor(viewed));
          const auto got = use.of(viewed, view.of(model->w.grad()));
          EXPECT_TRUE(is_dtensor(got));
          EXPECT_TENSORS_CLOSE(full(got), use.of(view.of(plain->w), view.of(plain->w.grad())), 1e-4, 1e-5);
        }
      }
    });
  }
}

TEST(ParameterView, MeetsGradientsInMatrixProducts) {
  using Product = std::function<Tensor(const Tensor& w, const Tensor& g)>;
  const std::vector<Product> products{
      [](const Tensor& w, const Tensor& g) { return w.t().mm(g); },
      [](const Tensor& w, const Tensor& g) { return g.t().mm(w); },
      [](const Tensor& w, const Tensor& g) { return torch::matmul(w, g.t()); },
      [](const Tensor& w, const Tensor& g) {
        return torch::einsum("ij,kj->ik", {w, g});
      },
      [](const Tensor& w, const Tensor& g) {
        return torch::einsum("ji,kj->ik", {w.t(), g});
      },
      [](const Tensor& w, const Tensor& g) { return torch::bmm(w.unsqueeze(0), g.t().unsqueeze(0)); },
      [](const Tensor& w, const Tensor& g) {
        const auto product = w.t().mm(g);
        return g - w.mm((product + product.t()) / 2); // onto the tangent space of the Stiefel manifold
      }};
  for (const auto& strategy : strategies()) {
    auto plain = make_viewed(), model = sharded_viewed(strategy);
    train(plain, twin_device());
    train(model, test_device());
    without_grad([&] {
      for (size_t i = 0; i < products.size(); ++i) {
        SCOPED_TRACE(strategy.name + ": product " + std::to_string(i));
        EXPECT_TENSORS_CLOSE(full(products[i](model->w, model->w.grad())), products[i](plain->w, plain->w.grad()), 1e-4, 1e-5);
      }
    });
  }
}

TEST(ParameterView, TakingOneSendsNothing) {
  for (const auto& strategy : strategies()) {
    auto model = sharded_viewed(strategy);
    fsdp(*model).reshard();
    without_grad([&] {
      const CountCollectives count;
      for (const auto& view : views()) view.of(model->w);
      EXPECT_EQ(count.total_calls(), 0) << strategy.name << ": " << count.to_string();
    });
  }
}

/// Beside activations a view is the gathered parameter: an evaluation sends what a training's forward sends.
TEST(ParameterView, EvaluationGathersEachGroupOnce) {
  for (const auto& strategy : strategies()) {
    auto plain = make_viewed(), model = sharded_viewed(strategy);
    const auto collectives = [&](const auto& run) {
      fsdp(*model).reshard();
      const CountCollectives count;
      EXPECT_TENSORS_CLOSE(run(), plain->forward(input(twin_device())), 1e-4, 1e-5) << strategy.name;
      return count.to_string();
    };
    const auto forward = [&] { return full(model->forward(input(test_device()))); };
    const auto called = [&] { return full(call(model, input(test_device()))); };
    collectives(forward); // from which a hierarchical strategy keeps parts
    const auto expected = collectives(forward);
    without_grad([&] {
      EXPECT_EQ(collectives(forward), expected) << strategy.name;
      EXPECT_EQ(collectives(called), expected) << strategy.name;
    });
  }
}

TEST(ParameterView, HasTheDtypeOfForwardBesideActivationsAndOfTheShardBesideGradients) {
  for (auto strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    strategy.options.mixed_precision.param_dtype = torch::kBFloat16;
    auto plain = make_viewed(), model = sharded_viewed(strategy);
    train(model, test_device());
    without_grad([&] {
      const auto x = input(test_device());
      const auto whole = full(model->w).to(torch::kBFloat16);
      EXPECT_EQ(x.mm(model->w.t()).scalar_type(), torch::kBFloat16);
      EXPECT_TENSORS_CLOSE(x.cpu().to(torch::kBFloat16).mm(whole.t()), x.mm(model->w.t()), 1e-2, 1e-2);
      EXPECT_TENSORS_CLOSE(full(model->w.t() * model->w.grad().t()), plain->w.t() * full(model->w.grad()).t(), 0, 0);
      model->w.view({-1}).mul_(1 + 1e-5); // which bf16 would not tell from 1
      model->w.t().add_(torch::full({kColumns, kRows}, 1e-6, x.options()));
      plain->w.mul_(1 + 1e-5).add_(1e-6);
    });
    EXPECT_TENSORS_CLOSE(full(model->w), plain->w.detach(), 1e-7, 1e-8);
  }
}

struct Write {
  std::string name;
  std::function<void(ViewedImpl& model, const Tensor& plain)> run; ///< `plain` has the shape of `w`, and is the same on all ranks
};

std::vector<Write> writes_of_values() {
  using M = ViewedImpl&;
  using T = const Tensor&;
  return {
      {"a number", [](M m, T) { m.w.t().mul_(0.5); }},
      {"a number into a flat view", [](M m, T) { m.w.view({-1}).mul_(0.5).add_(1); }},
      {"a gradient", [](M m, T) { m.w.t().add_(m.w.grad().t(), -0.1); }},
      {"a gradient into a flat view", [](M m, T) { m.w.flatten().sub_(m.w.grad().flatten()); }},
      {"a plain tensor", [](M m, T plain) { m.w.t().copy_(plain.t()); }},
      {"a plain tensor into rows", [](M m, T plain) { m.w.narrow(0, 1, 3).copy_(plain.narrow(0, 0, 3)); }},
      {"a plain number", [](M m, T plain) { m.w.t().mul_(plain.mean()); }},
      {"an out argument",
       [](M m, T) {
         auto out = m.w.t();
         torch::add_out(out, m.w.grad().t(), m.w.grad().t());
       }},
      {"lists",
       [](M m, T) {
         at::_foreach_add_(std::vector{m.w.t(), m.v.view({1, -1})}, std::vector{m.w.grad().t(), m.v.grad().view({1, -1})}, 2);
       }},
  };
}

std::vector<Write> writes_of_places() {
  using M = ViewedImpl&;
  using T = const Tensor&;
  return {
      {"a row", [](M m, T) { m.w[2].zero_(); }},
      {"an element", [](M m, T) { m.w[4][5].fill_(7); }},
      {"a column", [](M m, T) { m.w.select(1, 3).fill_(2); }},
      {"a number into an element", [](M m, T) { m.v[3].add_(2).mul_(0.5); }},
      {"a diagonal", [](M m, T) { m.w.diagonal().add_(1); }},
      {"a view of itself", [](M m, T) { m.w[0].copy_(m.w[3]); }},
      {"a view of another", [](M m, T) { m.w.select(1, 0).copy_(m.v.view({-1})); }},
      {"an index",
       [](M m, T) {
         m.w.t().index_put_({torch::tensor({1, 3}, m.w.device())}, 4.0);
       }},
      {"places", [](M m, T plain) { m.w.t().masked_fill_(plain.t() > 0, 3.0); }},
      {"noise into some rows", [](M m, T) { m.w.narrow(0, 0, 2).uniform_(); }},
      {"a view that is reshaped in place",
       [](M m, T) {
         auto view = m.w.view({kRows, 1, kColumns});
         view.squeeze_(1).t_().unsqueeze_(0).transpose_(0, 1);
         EXPECT_EQ(view.sizes(), (std::vector<int64_t>{kColumns, 1, kRows}));
         view[2].fill_(3);
       }},
      {"the result of a write",
       [](M m, T) {
         m.w.view({-1}).mul_(2).view({-1, 1}).select(0, 0).zero_();
       }},
      {"no elements", [](M m, T) { m.none.t().mul_(2).add_(1); }},
      {"one element",
       [](M m, T) {
         m.one.view({1, 1}).mul_(2).sub_(m.one.grad().view({1, 1}));
       }},
      {"an embedding's rows",
       [](M m, T) {
         auto rows = m.w.view({kRows, kColumns});
         torch::embedding_renorm_(rows, torch::tensor({1}, m.w.device()), 0.1, 2);
       }},
  };
}

/// Through a view, and into what is none.
std::vector<Write> writes_of_several() {
  using M = ViewedImpl&;
  using T = const Tensor&;
  return {
      {"a parameter beside a view",
       [](M m, T) {
         at::_foreach_mul_({m.w.t(), m.v}, 0.5);
       }},
      {"a parameter before a view",
       [](M m, T) {
         at::_foreach_mul_({m.v, m.w.t()}, 0.5);
       }},
      {"a parameter beside an element",
       [](M m, T) {
         at::_foreach_zero_({m.w[4][5], m.scalar});
       }},
      {"by a plain number",
       [](M m, T plain) {
         at::_foreach_mul_({m.w.view({-1}), m.v, m.none}, torch::full({}, 1.5, plain.options()));
       }},
      {"a gradient beside a view",
       [](M m, T) {
         at::_foreach_mul_({m.w.t(), m.w.grad(), m.cube.grad()[1]}, 0.5);
       }},
      {"a parameter and its views",
       [](M m, T) {
         at::_foreach_add_({m.w.t(), m.w, m.w.detach().t(), m.w.detach()}, 1);
       }},
      {"a parameter that is read too",
       [](M m, T) {
         at::_foreach_add_({m.w.t(), m.v}, {m.w.grad().t(), m.v}, 2);
       }},
      {"two out arguments",
       [](M m, T plain) {
         auto largest = m.v.view({-1}), places = torch::zeros_like(m.v.grad(), torch::kLong);
         at::max_out(largest, places, plain, 1);
         m.v.add_(places);
       }},
  };
}

std::vector<Write> writes() {
  auto all = writes_of_values();
  for (auto& write : writes_of_places()) all.push_back(std::move(write));
  for (auto& write : writes_of_several()) all.push_back(std::move(write));
  return all;
}

TEST(ParameterView, WritesReachTheParameter) {
  for (const auto& strategy : strategies()) {
    auto plain = make_viewed(), model = sharded_viewed(strategy);
    train(plain, twin_device());
    train(model, test_device());
    const auto run = [](const Write& write, ViewedImpl& on, const torch::Device& device) {
      torch::manual_seed(6);
      write.run(on, torch::randn({kRows, kColumns}).to(device));
    };
    without_grad([&] {
      for (const auto& write : writes()) {
        SCOPED_TRACE(strategy.name + ": " + write.name);
        run(write, *plain, twin_device());
        run(write, *model, test_device());
        EXPECT_LE(parameter_difference(*model, *plain), 1e-4);
        for (const auto& parameter : plain->named_parameters()) {
          EXPECT_TENSORS_CLOSE(full(model->named_parameters()[parameter.key()].grad()), parameter.value().grad(), 1e-4, 1e-4);
        }
        EXPECT_TENSORS_CLOSE(model->forward(input(test_device())), plain->forward(input(twin_device())), 1e-3, 1e-3);
      }
    });
  }
}

/// Beside a gradient too, a view is the parameter's: writes through it are writes of the parameter.
TEST(ParameterView, IsReturnedByOperatorsThatTakeAGradientToo) {
  using View = std::function<Tensor(const Tensor& w, const Tensor& g)>;
  const std::vector<std::pair<std::string, View>> views{
      {"view_as", [](const Tensor& w, const Tensor& g) { return w.view_as(g); }},
      {"expand_as", [](const Tensor& w, const Tensor& g) { return w.expand_as(g); }},
      {"reshape_as", [](const Tensor& w, const Tensor& g) { return w.reshape_as(g); }},
      {"type_as", [](const Tensor& w, const Tensor& g) { return w.type_as(g); }},
      {"broadcast_tensors",
       [](const Tensor& w, const Tensor& g) {
         return torch::broadcast_tensors({w, g})[0];
       }},
      {"atleast_2d",
       [](const Tensor& w, const Tensor& g) {
         return torch::atleast_2d({w, g})[0];
       }},
  };
  for (const auto& strategy : strategies()) {
    auto plain = make_viewed(), model = sharded_viewed(strategy);
    train(model, test_device());
    without_grad([&] {
      for (const auto& [name, of] : views) {
        SCOPED_TRACE(strategy.name + ": " + name);
        const auto view = of(model->w, model->w.grad());
        EXPECT_TRUE(is_dtensor(view));
        EXPECT_TENSORS_CLOSE(full(view * model->w.grad()), full(model->w) * full(model->w.grad()), 1e-5, 1e-6);
        const auto version = model->w._version();
        view.mul_(0.9);
        plain->w.mul_(0.9);
        EXPECT_GT(model->w._version(), version);
        EXPECT_LE(parameter_difference(*model, *plain), 1e-6);
      }
    });
  }
}

/// The other parameter gives a shape alone.
TEST(ParameterView, OfTheShapeOfAnotherParameterIsAsOneOfThatShape) {
  using View = std::function<Tensor(const Tensor& w, const Tensor& other)>;
  const std::vector<std::pair<std::string, View>> views{
      {"view_as", [](const Tensor& w, const Tensor& other) { return w.view_as(other); }},
      {"expand_as", [](const Tensor& w, const Tensor& other) { return w.expand_as(other); }},
      {"reshape_as", [](const Tensor& w, const Tensor& other) { return w.t().t().reshape_as(other); }},
  };
  for (const auto& strategy : strategies()) {
    auto model = sharded_viewed(strategy);
    fsdp(*model).reshard();
    const auto w = full(model->w);
    without_grad([&] {
      std::vector<Tensor> taken;
      const CountCollectives count;
      for (const auto& [name, of] : views) taken.push_back(of(model->w, model->w.t().t()));
      EXPECT_EQ(count.total_calls(), 0) << strategy.name << ": " << count.to_string();
      for (size_t i = 0; i < views.size(); ++i) {
        SCOPED_TRACE(strategy.name + ": " + views[i].first);
        EXPECT_TENSORS_CLOSE(full(taken[i] * 2 + model->w), w * 3, 1e-6);
        EXPECT_TENSORS_CLOSE(full(taken[i].exp()), w.exp(), 1e-6);
        const auto x = torch::ones({kColumns, 2}, test_device());
        EXPECT_TENSORS_CLOSE(taken[i].mm(x).cpu(), w.mm(x.cpu()), 1e-5);
      }
    });
  }
}

/// Autograd saves a frozen parameter that a composite takes beside a DTensor.
TEST(ParameterView, WritesBeforeBackwardAreRefusedWhereAFrozenParameterMetADTensor) {
  using Use = std::function<Tensor(const Tensor& g, const Tensor& w)>;
  const std::vector<Use> uses{[](const Tensor& g, const Tensor& w) { return torch::matmul(g, w); },
                              [](const Tensor& g, const Tensor& w) {
                                return torch::einsum("ij,jk->ik", {g, w});
                              }};
  for (const auto& strategy : strategies()) {
    for (size_t i = 0; i < uses.size(); ++i) {
      SCOPED_TRACE(strategy.name + ": " + std::to_string(i));
      auto model = sharded_viewed(strategy);
      train(model, test_device());
      auto gradient = model->w.grad().detach().t().requires_grad_();
      model->w.set_requires_grad(false);
      const auto sum = uses[i](gradient, model->w).sum();
      {
        const torch::NoGradGuard no_grad;
        model->w.mul_(2);
      }
      EXPECT_THROWS_WITH(sum.backward(), "modified by an inplace operation");
    }
  }
}

TEST(ParameterView, SeesWritesThatFollow) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    auto plain = make_viewed(), model = sharded_viewed(strategy);
    const auto run = [](Viewed& each, const torch::Device& device) {
      Tensor view, flat;
      {
        const torch::NoGradGuard no_grad;
        view = each->w.t();
        flat = each->w.view({-1});
      }
      torch::optim::SGD optimizer(each->parameters(), 0.1);
      train(each, device);
      optimizer.step();
      Tensor x = input(device).requires_grad_();
      x.mm(view).sum().backward(); // in grad mode too it is the whole
      const torch::NoGradGuard no_grad;
      return std::vector<Tensor>{full(x.grad()), full(flat * each->w.grad().view({-1}))};
    };
    const auto expected = run(plain, twin_device()), got = run(model, test_device());
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TENSORS_CLOSE(got[i], expected[i], 1e-4, 1e-5);
  }
}

TEST(ParameterView, IsADTensorInTheFunctionsOfDTensors) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    auto plain = make_viewed(), model = sharded_viewed(strategy);
    const torch::NoGradGuard no_grad;
    const auto expected = plain->w.t().detach().cpu();
    const auto view = model->w.t();
    EXPECT_TENSORS_CLOSE(full(view), expected, 0, 0);
    EXPECT_EQ(DTensor(view).spec().sizes(), expected.sizes().vec());
    EXPECT_EQ(to_local(view).sizes(), c10::IntArrayRef(DTensor(view).spec().local_sizes()));
    EXPECT_NE(to_string(view).find("DTensor"), std::string::npos);
    EXPECT_TENSORS_CLOSE(unsharded(view), expected, 0, 0);
    EXPECT_EQ(torch::zeros_like(view).sizes(), expected.sizes());
    EXPECT_TRUE(is_dtensor(torch::zeros_like(view)));
    EXPECT_FLOAT_EQ(model->w[1][2].item<float>(), expected[2][1].item<float>());
    EXPECT_TRUE(view.to(torch::kDouble).sizes() == expected.sizes());
  }
}

/// Its result is a view of the weight, which is taken without grad mode.
struct ReturnsView : torch::autograd::Function<ReturnsView> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& weight, bool whole) {
    return (whole ? unsharded(weight) : weight).t();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list gradients) {
    return {gradients[0].t(), Tensor()};
  }
};

TEST(ParameterView, OfAFunctionIsAnErrorWithTheRemedy) {
  const auto model = sharded_viewed({"full"});
  EXPECT_THROWS_WITH(input(test_device()).mm(ReturnsView::apply(model->w, false)),
                     "In the forward of a torch::autograd::Function, take the view of tessera::unsharded(weight)");
  input(test_device()).mm(ReturnsView::apply(model->w, true)).sum().backward();
  EXPECT_TENSORS_CLOSE(full(model->w.grad()).t(), input(at::kCPU).sum(0, true).t().expand({kColumns, kRows}));
}

TEST(ParameterView, ErrorsNameTheParameter) {
  std::optional<Viewed> model(sharded_viewed({"full"}));
  Tensor view, own;
  {
    const torch::NoGradGuard no_grad;
    view = (*model)->w.t();
    own = (*model)->w.detach().t();
    EXPECT_THROWS_WITH(view.resize_({2, 2}), "resize_ on a view of the parameter w that was taken without grad mode");
  }
  own.requires_grad_();
  EXPECT_THROWS_WITH(input(test_device()).mm(own),
                     "a view of the parameter w that was taken without grad mode and requires a gradient");
  auto x = torch::ones({kColumns, kRows}).to(test_device()).requires_grad_();
  EXPECT_THROWS_WITH(view.copy_(x), "a tensor that requires a gradient is written into a view of a sharded parameter");
  model.reset();
  EXPECT_THROWS_WITH(input(test_device()).mm(view), "a view of a sharded parameter is read whose group is gone");
}

} // namespace
} // namespace tessera::testing::parameter_view_test
