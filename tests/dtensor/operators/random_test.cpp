// Operators that draw, beyond those that fill a tensor (init_test.cpp): they draw what one device would, wherever the parts of
// their arguments are cut, and leave the generator as it does.
#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::random_test {
namespace {

using at::Tensor;
namespace F = torch::nn::functional;

struct Draw {
  std::string name;
  std::function<Tensor(const Tensor&)> apply; ///< of probabilities
  int64_t least_dims = 0, most_dims = 9;
  bool in_place = false;
};

/// What an operator that writes leaves in a copy of `x`.
template <typename Write>
std::function<Tensor(const Tensor&)> written(const Write& write) {
  return [write](const Tensor& x) {
    auto copy = x.clone();
    write(copy);
    return copy;
  };
}

std::vector<Draw> draws_in_place() {
  return {
      {"bernoulli_ of probabilities", written([](Tensor& x) { x.bernoulli_(x.detach().clone()); }), 0, 9, true},
      {"bernoulli_ of a row of probabilities", written([](Tensor& x) { x.bernoulli_(x.select(0, 0).clone().fill_(.25)); }), 2, 9,
       true},
      {"dropout_", written([](Tensor& x) { torch::dropout_(x, .4, true); }), 0, 9, true},
      {"alpha_dropout_", written([](Tensor& x) { torch::alpha_dropout_(x, .4, true); }), 0, 9, true},
      {"rrelu_", written([](Tensor& x) { torch::rrelu_(x.sub_(.5), .1, .3, true); }), 0, 9, true},
      {"rrelu_ in evaluation", written([](Tensor& x) { torch::rrelu_(x.sub_(.5), .1, .3, false); }), 0, 9, true},
  };
}

std::vector<Draw> draws() {
  std::vector<Draw> result = {
      {"bernoulli", [](const Tensor& x) { return torch::bernoulli(x); }},
      {"bernoulli of a number", [](const Tensor& x) { return torch::bernoulli(x, .3); }},
      {"bernoulli of what was computed", [](const Tensor& x) { return torch::bernoulli(torch::full_like(x, .9)); }},
      {"rrelu", [](const Tensor& x) { return torch::rrelu(x - .5, .1, .3, true); }},
      {"rrelu in evaluation", [](const Tensor& x) { return torch::rrelu(x - .5, .1, .3, false); }},
      {"RReLU", [](const Tensor& x) { return F::rrelu(x - .5, F::RReLUFuncOptions().training(true)); }},
      {"dropout", [](const Tensor& x) { return torch::dropout(x, .4, true); }},
      {"alpha_dropout", [](const Tensor& x) { return torch::alpha_dropout(x, .4, true); }},
      {"feature_dropout", [](const Tensor& x) { return torch::feature_dropout(x, .4, true); }, 2},
      {"feature_alpha_dropout", [](const Tensor& x) { return torch::feature_alpha_dropout(x, .4, true); }, 2},
      {"normal of means", [](const Tensor& x) { return at::normal(x, 2.); }},
      {"normal of deviations", [](const Tensor& x) { return at::normal(1., x); }},
      {"normal of both", [](const Tensor& x) { return at::normal(x, x + 1); }},
      {"multinomial", [](const Tensor& x) { return torch::multinomial(x + .1, 2, true); }, 1, 2},
      {"multinomial without replacement", [](const Tensor& x) { return torch::multinomial(x + .1, 1); }, 1, 2},
      {"poisson", [](const Tensor& x) { return torch::poisson(x * 8); }},
      {"binomial", [](const Tensor& x) { return torch::binomial((x * 8).round(), x); }},
      {"_standard_gamma", [](const Tensor& x) { return torch::_standard_gamma(x + .1); }},
      {"_sample_dirichlet", [](const Tensor& x) { return torch::_sample_dirichlet(x + .1); }, 1},
      {"gumbel_softmax", [](const Tensor& x) { return F::gumbel_softmax(x, F::GumbelSoftmaxFuncOptions().dim(-1)); }, 1},
      {"rand_like", [](const Tensor& x) { return torch::rand_like(x); }},
      {"randint_like", [](const Tensor& x) { return torch::randint_like(x, 9); }},
  };
  for (auto& draw : draws_in_place()) result.push_back(std::move(draw));
  return result;
}

/// Probabilities that parts of a sum or an average hold without rounding.
Tensor probabilities(const std::vector<int64_t>& sizes) {
  const auto count = c10::multiply_integers(sizes);
  return (torch::arange(count, torch::kDouble) * 5).remainder(8).div(8).view(sizes);
}

void expect_draw_of_one_device(const Draw& draw, const Tensor& whole, const DeviceMesh& mesh, const Placement& placement) {
  const auto sharded = make(whole, mesh, {placement});
  torch::manual_seed(7);
  const auto expected = draw.apply(whole), after = torch::rand({3});
  torch::manual_seed(7);
  const auto drawn = draw.apply(sharded);
  EXPECT_TENSORS_EQUAL(torch::rand({3}), after) << "the generator went another way";
  EXPECT_TENSORS_CLOSE(whole_of(drawn), expected, 1e-12, 1e-12); // what is computed from the draws is rounded part by part
}

TEST(Random, EqualsTheDrawOfOneDevice) {
  const auto mesh = line_mesh();
  const torch::NoGradGuard no_grad;
  for (const auto& sizes :
       std::vector<std::vector<int64_t>>{{5, 3}, {4, 6}, {7}, {2, 3, 4}, {3, 2, 2, 3}, {1, 1}, {1}, {}, {0, 3}}) {
    const auto whole = probabilities(sizes);
    auto placements = whole_placements(sizes, mesh.size());
    for (const auto& sum : {Partial::Op::kSum, Partial::Op::kAvg}) placements.emplace_back(Partial{sum});
    for (const auto& draw : draws()) {
      if (whole.dim() < draw.least_dims || whole.dim() > draw.most_dims || (whole.numel() == 0 && draw.least_dims > 0)) continue;
      for (const auto& placement : placements) {
        if (draw.in_place && is_partial(placement)) continue;
        SCOPED_TRACE(c10::str(draw.name, " of ", whole.sizes(), " ", to_string(placement)));
        expect_draw_of_one_device(draw, whole, mesh, placement);
      }
    }
  }
}

TEST(Random, KeepsThePlacementOfWhatItDrawsFor) {
  const auto mesh = line_mesh();
  const torch::NoGradGuard no_grad;
  for (const auto& placement : whole_placements({5, 3}, mesh.size())) {
    const auto sharded = make(probabilities({5, 3}), mesh, {placement});
    for (const auto& drawn : {torch::bernoulli(sharded), torch::rrelu(sharded, .1, .3, true), torch::dropout(sharded, .5, true)})
      EXPECT_EQ(DTensor(drawn).placements(), Placements{placement});
  }
}

TEST(Random, SlopesThatWereDrawnScaleTheGradient) {
  const auto mesh = line_mesh();
  for (const auto& placement : whole_placements({5, 3}, mesh.size())) {
    SCOPED_TRACE(to_string(placement));
    auto plain = (probabilities({5, 3}) - .5).requires_grad_();
    auto sharded = make(plain.detach(), mesh, {placement}).set_requires_grad(true);
    for (const bool trains : {true, false}) {
      torch::manual_seed(3);
      torch::rrelu(plain, .1, .3, trains).square().sum().backward();
      torch::manual_seed(3);
      torch::rrelu(sharded, .1, .3, trains).square().sum().backward();
    }
    EXPECT_TENSORS_CLOSE(DTensor(sharded.grad()).full_tensor(), plain.grad());
  }
}

} // namespace
} // namespace tessera::testing::random_test
