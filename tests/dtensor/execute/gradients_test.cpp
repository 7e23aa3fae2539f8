// Gradients where the placements of a tensor, of its gradient and of what a kernel saved meet, and gradients of gradients.
#include <tessera/activations/recompute.h>
#include <tessera/dtensor/calls/call_site.h>
#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/local_map.h>
#include <tessera/tests/support/sweep.h>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::gradients_test {
namespace {

using at::Tensor;
using torch::autograd::grad;

Tensor whole_detached(const Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return is_dtensor(tensor) ? DTensor(tensor.detach()).full_tensor() : tensor.detach();
}

Tensor draw(at::IntArrayRef sizes, uint64_t seed) {
  torch::manual_seed(seed);
  return torch::randn(sizes, torch::kDouble);
}

Tensor placed(const Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  return Tensor(make(whole, mesh, placements)).detach();
}

/// The meshes over all ranks, and the placements of a tensor of `sizes` on them.
std::vector<std::pair<DeviceMesh, std::vector<Placements>>> layouts(const std::vector<int64_t>& sizes) {
  const auto line = line_mesh();
  std::vector<Placements> on_line;
  for (const auto& placement : whole_placements(sizes, line.size())) on_line.push_back({placement});
  for (const auto op : {Partial::Op::kSum, Partial::Op::kAvg, Partial::Op::kMax}) on_line.push_back({Partial{op}});
  std::vector<std::pair<DeviceMesh, std::vector<Placements>>> result{{line, on_line}};
  if (world_size() != 4) return result;
  std::vector<Placements> on_grid{{Replicate{}, Replicate{}}, {Shard{1}, Shard{0}},  {Shard{0}, Shard{0}},
                                  {Replicate{}, Shard{1}},    {Shard{1}, Partial{}}, {Partial{}, Partial{}}};
  result.emplace_back(init_device_mesh(test_device_type(), {2, 2}), on_grid);
  return result;
}

// --- the second order ---------------------------------------------------------------------------------------------------------

/// A function of a DTensor and another placement, and what it is on a plain tensor.
struct Differentiable {
  const char* name;
  Tensor (*plain)(const Tensor&);
  Tensor (*run)(const DTensor&, const Placements& other);
};

Tensor cube(const Tensor& x) { return x.pow(3); }

const Differentiable kFunctions[]{
    {"redistribute", cube, [](const DTensor& x, const Placements& to) -> Tensor { return x.redistribute(to).pow(3); }},
    {"redistribute after", cube,
     [](const DTensor& x, const Placements& to) -> Tensor { return DTensor(x.pow(3)).redistribute(to); }},
    {"redistribute_async", cube, [](const DTensor& x, const Placements& to) { return x.redistribute_async(to).wait().pow(3); }},
    {"redistribute in another dtype", cube,
     [](const DTensor& x, const Placements& to) {
       return x.redistribute(to, {.forward_dtype = torch::kDouble, .backward_dtype = torch::kDouble}).pow(3);
     }},
    {"between meshes", cube,
     [](const DTensor& x, const Placements& to) -> Tensor {
       std::vector<int64_t> backwards(world_size());
       std::iota(backwards.rbegin(), backwards.rend(), 0);
       const auto other = make_device_mesh(test_device_type(), {world_size()}, backwards);
       return DTensor(x.redistribute(other, {Shard{1}}).pow(3)).redistribute(x.mesh(), to);
     }},
    {"full_tensor", cube, [](const DTensor& x, const Placements&) { return x.full_tensor().pow(3); }},
    {"full_tensor, from_local", cube,
     [](const DTensor& x, const Placements& to) -> Tensor {
       const Placements everywhere(static_cast<size_t>(x.mesh().ndim()));
       return from_local(x.full_tensor().pow(3), x.mesh(), everywhere).redistribute(to);
     }},
    {"to_local, from_local", cube,
     [](const DTensor& x, const Placements&) {
       return Tensor(from_local(to_local(x), x.mesh(), x.placements(), x.sizes().vec())).pow(3);
     }},
    {"on the parts", cube,
     [](const DTensor& x, const Placements&) -> Tensor {
       const auto parts = x.redistribute(replicate_partial(x.placements()));
       return from_local(to_local(parts).pow(3), x.mesh(), parts.placements(), x.sizes().vec());
     }},
    {"local_map", cube,
     [](const DTensor& x, const Placements& to) -> Tensor {
       const auto on = replicate_partial(to);
       return local_map([](const std::vector<Tensor>& t) { return std::vector<Tensor>{t[0].pow(3)}; }, {on}, {on},
                        {x.sizes().vec()})({x})[0];
     }},
    {"local_map to a sum", [](const Tensor& x) { return x.pow(3).sum(0); },
     [](const DTensor& x, const Placements&) -> Tensor {
       const auto dims = static_cast<size_t>(x.mesh().ndim());
       return local_map([](const std::vector<Tensor>& t) { return std::vector<Tensor>{t[0].pow(3).sum(0)}; },
                        {Placements(dims, Partial{})}, {Placements(dims, Shard{0})}, {{x.size(1)}})({x})[0];
     }},
    {"local_map with a gradient that is a sum", [](const Tensor& x) { return x.matmul(x.t()).pow(2); },
     [](const DTensor& x, const Placements&) -> Tensor {
       const auto dims = static_cast<size_t>(x.mesh().ndim());
       const Placements rows(dims, Shard{0}), all(dims), sum(dims, Partial{});
       return local_map([](const std::vector<Tensor>& t) { return std::vector<Tensor>{t[0].matmul(t[1].t()).pow(2)}; }, {rows},
                        {rows, all}, {{x.size(0), x.size(0)}}, {rows, sum})({x, x})[0];
     }},
};

/// The result, the gradient of its weighted sum, and the gradient of a weighted sum of that.
std::vector<Tensor> to_the_second_order(const Tensor& x, const std::function<Tensor(const Tensor&)>& function,
                                        const std::function<Tensor(const Tensor&)>& weight) {
  const auto y = function(x);
  const auto first = grad({(y * weight(y)).sum()}, {x}, {}, true, true)[0];
  const auto second = grad({(first.tanh() * weight(first)).sum()}, {x})[0];
  return {whole_detached(y), whole_detached(first), whole_detached(second)};
}

TEST(SecondOrder, OfTheApiEqualsPlainTensors) {
  const auto whole = draw({5, 3}, 1);
  for (const auto& function : kFunctions) {
    const auto plain =
        to_the_second_order(whole.clone().requires_grad_(), function.plain, [](const Tensor& y) { return draw(y.sizes(), 2); });
    for (const auto& [mesh, placements] : layouts({5, 3})) {
      const auto& grid = mesh;
      for (size_t i = 0; i < placements.size(); ++i) {
        const auto &from = placements[i], &to = placements[(3 * i + 1) % placements.size()];
        SCOPED_TRACE(::testing::Message() << function.name << " " << from << " " << to);
        const auto weight = [&](const Tensor& y) {
          const auto values = draw(y.sizes(), 2);
          return is_dtensor(y) ? placed(values, grid, Placements(static_cast<size_t>(grid.ndim()), Shard{0}))
                               : values.to(y.device());
        };
        const auto moved = to_the_second_order(
            placed(whole, grid, from).requires_grad_(), [&](const Tensor& x) { return function.run(DTensor(x), to); }, weight);
        for (size_t order = 0; order < 3; ++order) EXPECT_TENSORS_CLOSE(moved[order], plain[order], 1e-9, 1e-9) << order;
      }
    }
  }
}

/// Each rank's own leaf, against finite differences of the sum over the ranks.
TEST(SecondOrder, OfPartsEqualsDifferences) {
  const auto mesh = line_mesh();
  const auto rank = static_cast<uint64_t>(process_context().rank());
  for (const Placement& placement : {Placement(Shard{0}), Placement(Partial{})}) {
    SCOPED_TRACE(::testing::Message() << placement);
    const auto gradient = [&](const Tensor& local, bool graph) {
      const auto y = from_local(local, mesh, {placement}).redistribute({Replicate{}});
      return grad({y.pow(3).sum()}, {local}, {}, std::nullopt, graph)[0];
    };
    const auto own = [&](uint64_t seed) { return draw({2, 3}, seed + rank).to(mesh.device()); };
    const auto local = own(10).requires_grad_(), direction = own(20), weight = own(30);
    const auto second = grad({(gradient(local, true) * weight).sum()}, {local})[0];
    constexpr double kStep = 1e-5;
    const auto there = gradient((local + kStep * direction).detach().requires_grad_(), false),
               back = gradient((local - kStep * direction).detach().requires_grad_(), false);
    const auto everyone = [&](const Tensor& value) { return from_local(value.detach(), mesh, {Partial{}}).full_tensor(); };
    EXPECT_TENSORS_CLOSE(everyone((second * direction).sum()), everyone(((there - back) * weight).sum() / (2 * kStep)), 1e-6,
                         1e-6);
  }
}

// --- what a kernel saved ------------------------------------------------------------------------------------------------------

struct Normalization {
  const char* name;
  Tensor (*run)(const Tensor& x, const Tensor& weight, const Tensor& bias);
};

TEST(Gradients, OfNormalizationsUnderEveryPairOfPlacements) {
  const std::vector<int64_t> sizes{5, 6, 4};
  const Normalization kNormalizations[]{
      {"layer_norm", [](const Tensor& x, const Tensor& w, const Tensor& b) { return torch::layer_norm(x, {4}, w, b); }},
      {"rms_norm", [](const Tensor& x, const Tensor& w, const Tensor& b) { return torch::rms_norm(x, {4}, w) + b; }},
      {"group_norm", [](const Tensor& x, const Tensor& w,
                        const Tensor& b) { return torch::group_norm(x.transpose(1, 2), 2, w, b).transpose(1, 2); }},
      {"batch_norm",
       [](const Tensor& x, const Tensor& w, const Tensor& b) {
         return torch::batch_norm(x.transpose(1, 2), w, b, {}, {}, true, 0.1, 1e-5, false).transpose(1, 2);
       }},
  };
  const auto x = draw(sizes, 3), factor = draw(sizes, 4), weight = draw({4}, 5), bias = draw({4}, 6);
  for (const auto& norm : kNormalizations) {
    const auto gradients = [&](const Tensor& t, const Tensor& w, const Tensor& b, const Tensor& other) {
      return grad({(norm.run(t, w, b) * other).sum()}, {t, w, b});
    };
    const auto plain =
        gradients(x.clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_(), factor);
    for (const auto& [mesh, placements] : layouts(sizes)) {
      const Placements everywhere(static_cast<size_t>(mesh.ndim()));
      std::vector<std::pair<Placements, Placements>> pairs;
      for (const auto& input : placements) {
        for (const auto& other : placements) pairs.emplace_back(input, other);
      }
      for (const auto& [input, other] : sweep(pairs, 25)) {
        SCOPED_TRACE(::testing::Message() << norm.name << " of " << input << ", times " << other);
        const auto moved = gradients(placed(x, mesh, input).requires_grad_(), placed(weight, mesh, everywhere).requires_grad_(),
                                     placed(bias, mesh, everywhere).requires_grad_(), placed(factor, mesh, other));
        for (size_t i = 0; i < 3; ++i) EXPECT_TENSORS_CLOSE(whole_detached(moved[i]), plain[i], 1e-9, 1e-9) << i;
      }
    }
  }
}

/// The formula writes the eigenvalues' gradient into the diagonal of what it computed of the eigenvectors'.
TEST(Gradients, OfFormulasThatWriteIntoViewsOfWhatTheyCompute) {
  const auto half = draw({4, 4}, 7), of_values = draw({4}, 8), of_vectors = draw({4, 4}, 9);
  const Tensor x = half + half.t();
  const auto gradient = [](const Tensor& t, const Tensor& values_factor, const Tensor& vectors_factor) {
    const auto [values, vectors] = torch::linalg_eigh((t + t.t()) / 2);
    return grad({(values * values_factor).sum() + (vectors.abs() * vectors_factor).sum()}, {t})[0];
  };
  const auto plain = gradient(x.clone().requires_grad_(), of_values, of_vectors);
  for (const auto& [mesh, squares] : layouts({4, 4})) {
    const auto dims = static_cast<size_t>(mesh.ndim());
    for (const auto& line : {Placements(dims), Placements(dims, Shard{0}), Placements(dims, Partial{})}) {
      for (const auto& square : squares) {
        SCOPED_TRACE(::testing::Message() << "values times " << line << ", vectors times " << square);
        const auto moved = gradient(placed(x, mesh, Placements(dims)).requires_grad_(), placed(of_values, mesh, line),
                                    placed(of_vectors, mesh, square));
        EXPECT_TENSORS_CLOSE(whole_detached(moved), plain, 1e-9, 1e-9);
      }
    }
  }
}

/// The formula writes single elements of a vector that it makes: the ranks that have them, and those that do not, decide alike.
TEST(Gradients, OfFormulasThatWriteSelectedElements) {
  const auto x = draw({5, 5}, 10), tau = draw({5}, 11), factor = draw({5, 5}, 12);
  const auto gradients = [](const Tensor& x, const Tensor& tau, const Tensor& factor) {
    return grad({(torch::linalg_householder_product(x, tau) * factor).sum()}, {x, tau});
  };
  const auto plain = gradients(x.clone().requires_grad_(), tau.clone().requires_grad_(), factor);
  for (const auto& [mesh, squares] : layouts({5, 5})) {
    std::vector<Placements> lines{Placements(static_cast<size_t>(mesh.ndim())), {Shard{0}}};
    if (mesh.ndim() == 2) lines = {{Replicate{}, Shard{0}}, {Shard{0}, Replicate{}}};
    for (const auto& line : lines) {
      for (const auto& square : squares) {
        SCOPED_TRACE(::testing::Message() << "tau and the matrix " << line << ", times " << square);
        const auto moved = gradients(placed(x, mesh, line).requires_grad_(), placed(tau, mesh, line).requires_grad_(),
                                     placed(factor, mesh, square));
        for (size_t i = 0; i < plain.size(); ++i) EXPECT_TENSORS_CLOSE(whole_detached(moved[i]), plain[i], 1e-9, 1e-9);
      }
    }
  }
}

/// Positions in a tensor of 5 x 6.
struct Positions {
  const char* name;
  std::vector<int64_t> rows, columns; ///< none: all are taken whole
  std::vector<int64_t> values;        ///< the shape of what is written there
  bool repeat = false;                ///< two of them are the same: values are added
};

const Positions kPositions[]{{"rows", {4, 1, 2}, {}, {3, 6}},
                             {"rows, of one value each", {4, 1, 2}, {}, {3, 1}},
                             {"columns", {}, {5, 0, 2}, {5, 3}},
                             {"rows that repeat", {4, 1, 4}, {}, {3, 6}, true},
                             {"columns that repeat, of one row", {}, {5, 0, 2, 5}, {1, 4}, true},
                             {"pairs that repeat", {4, 1, 4, 4}, {5, 0, 5, 3}, {4, 1}, true}};

using Place = std::function<Tensor(const Tensor&)>;

/// A read and two writes at `positions`, and the gradients of them.
std::vector<Tensor> read_and_write(const Positions& positions, const Tensor& x, const Tensor& values, const Place& place,
                                   bool adds) {
  c10::List<std::optional<Tensor>> indices;
  for (const auto& dim : {positions.rows, positions.columns}) {
    indices.push_back(dim.empty() ? std::nullopt : std::optional(place(torch::tensor(dim))));
  }
  const bool pairs = !positions.rows.empty() && !positions.columns.empty();
  const auto put = x.index_put(indices, pairs ? values.squeeze(1) : values, adds);
  const auto gradients = grad({put.square().sum() + x.index(indices).pow(3).sum()}, {x, values});
  return {whole_detached(put), whole_detached(gradients[0]), whole_detached(gradients[1])};
}

TEST(Gradients, OfReadsAndWritesAtPositionsUnderEveryPairOfPlacements) {
  const auto run = [](const Positions& positions, bool adds) {
    const auto x = draw({5, 6}, 1), values = draw(positions.values, 2);
    const auto plain = read_and_write(
        positions, x.clone().requires_grad_(), values.clone().requires_grad_(), [](auto& t) { return t; }, adds);
    const auto of_x = layouts({5, 6}), of_values = layouts(positions.values);
    for (size_t m = 0; m < of_x.size(); ++m) {
      const auto& mesh = of_x[m].first;
      const auto whole = [&](const Tensor& t) { return placed(t, mesh, Placements(static_cast<size_t>(mesh.ndim()))); };
      for (const auto& from : of_x[m].second) {
        for (const auto& to : of_values[m].second) {
          SCOPED_TRACE(::testing::Message() << positions.name << " of " << from << ", values " << to << (adds ? " added" : ""));
          const auto moved = read_and_write(positions, placed(x, mesh, from).requires_grad_(),
                                            placed(values, mesh, to).requires_grad_(), whole, adds);
          for (size_t i = 0; i < plain.size(); ++i) EXPECT_TENSORS_CLOSE(moved[i], plain[i], 1e-9, 1e-9);
        }
      }
    }
  };
  for (const auto& positions : kPositions) {
    run(positions, true);
    if (!positions.repeat) run(positions, false);
  }
}

TEST(Gradients, WritesAtPositionsInPlaceUnderEveryPairOfPlacements) {
  const auto mesh = line_mesh();
  const auto x = draw({5, 6}, 1), values = draw({3, 6}, 2), rows = torch::tensor({4, 1, 2});
  const auto write = [&](const Tensor& into, const Tensor& given, const Tensor& at) {
    into.index_put_({at}, given);
    into.index_put_({std::optional<Tensor>(), at}, given.t().narrow(0, 0, 5), true);
  };
  const auto expected = x.clone();
  write(expected, values, rows);
  for (const auto& from : whole_placements({5, 6}, mesh.size())) {
    if (std::holds_alternative<StridedShard>(from)) continue;
    for (const auto& to : whole_placements({3, 6}, mesh.size())) {
      SCOPED_TRACE(::testing::Message() << from << ", values " << to);
      const auto into = placed(x, mesh, {from});
      write(into, placed(values, mesh, {to}), placed(rows, mesh, {Replicate{}}));
      EXPECT_TENSORS_CLOSE(whole_detached(into), expected, 1e-12, 1e-12);
    }
  }
}

TEST(Gradients, OfIndexedRowsSendNothingWhereColumnsAreSplit) {
  const auto mesh = line_mesh();
  const auto rows = placed(torch::tensor({4, 1, 4}), mesh, {Replicate{}});
  const auto x = placed(draw({5, 8}, 1), mesh, {Shard{1}}).requires_grad_();
  const auto gradient = placed(draw({3, 8}, 2), mesh, {Shard{1}});
  const CountCollectives counted;
  x.index({rows}).backward(gradient);
  EXPECT_EQ(counted.total_bytes(), 0) << counted.to_string();
  EXPECT_EQ(DTensor(x.grad()).placements(), Placements{Shard{1}});
}

TEST(Gradients, OfConvolutionsWithoutChannels) {
  const auto mesh = line_mesh();
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0})}) {
    const auto x = placed(draw({5, 0, 2}, 1), mesh, {placement}).requires_grad_();
    const auto weight = placed(draw({4, 0, 2}, 2), mesh, {placement}).requires_grad_();
    const auto gradients = grad({torch::conv1d(x, weight).sum()}, {x, weight});
    EXPECT_EQ(gradients[0].sizes(), x.sizes()) << placement;
    EXPECT_EQ(gradients[1].sizes(), weight.sizes()) << placement;
  }
}

TEST(Gradients, OfLossesOfOperandsThatBroadcast) {
  using Loss = Tensor (*)(const Tensor&, const Tensor&, int64_t);
  const std::pair<const char*, Loss> kLosses[]{
      {"mse_loss", [](const Tensor& x, const Tensor& y, int64_t r) { return torch::mse_loss(x, y, r); }},
      {"smooth_l1_loss", [](const Tensor& x, const Tensor& y, int64_t r) { return torch::smooth_l1_loss(x, y, r); }},
      {"huber_loss", [](const Tensor& x, const Tensor& y, int64_t r) { return torch::huber_loss(x, y, r); }},
      {"soft_margin_loss", [](const Tensor& x, const Tensor& y, int64_t r) { return torch::soft_margin_loss(x, y.detach(), r); }},
      {"l1_loss", [](const Tensor& x, const Tensor& y, int64_t r) { return torch::l1_loss(x, y, r); }},
      {"kl_div", [](const Tensor& x, const Tensor& y, int64_t r) { return torch::kl_div(x, y.square() + 1, r); }},
      {"binary_cross_entropy_with_logits",
       [](const Tensor& x, const Tensor& y, int64_t r) {
         return torch::binary_cross_entropy_with_logits(x.expand({4, 4}), y.sigmoid().expand({4, 4}), y.sigmoid(), {}, r);
       }},
      {"hinge_embedding_loss",
       [](const Tensor& x, const Tensor& y, int64_t r) { return torch::hinge_embedding_loss(x, y.sign(), 1, r); }},
      {"poisson_nll_loss",
       [](const Tensor& x, const Tensor& y, int64_t r) { return torch::poisson_nll_loss(x, y, true, false, 1e-8, r); }},
      {"dist", [](const Tensor& x, const Tensor& y, int64_t) { return torch::dist(x, y); }},
      {"mean of a product", [](const Tensor& x, const Tensor& y, int64_t) { return (x * y).mean(); }},
      {"variance of a sum", [](const Tensor& x, const Tensor& y, int64_t) { return (x + y).var(); }},
  };
  const std::pair<std::vector<int64_t>, std::vector<int64_t>> kShapes[]{
      {{4, 1}, {1, 4}}, {{4, 4}, {4, 1}}, {{4, 1}, {4, 4}}, {{4}, {4, 1}}, {{4, 4}, {4, 4}}};
  const auto mesh = line_mesh();
  for (const auto& [name, loss] : kLosses) {
    for (const auto& [left, right] : kShapes) {
      const auto x = draw(left, 1), y = draw(right, 2);
      for (const auto reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
        const auto run = [loss = loss, reduction](const Tensor& a, const Tensor& b) {
          const auto value = loss(a, b, reduction);
          auto results = grad({value.sum()}, {a, b}, {}, std::nullopt, false, true);
          results.push_back(value);
          return results;
        };
        std::vector<Tensor> plain;
        try {
          plain = run(x.clone().requires_grad_(), y.clone().requires_grad_());
        } catch (const c10::Error&) {
          continue; // this loss takes operands of one shape
        }
        for (const Placement& a : {Placement(Shard{0}), Placement(Replicate{}), Placement(Partial{})}) {
          for (const Placement& b : {Placement(Shard{0}), Placement(Replicate{})}) {
            SCOPED_TRACE(::testing::Message()
                         << name << " " << c10::str(left, right) << " " << reduction << " " << a << " " << b);
            const auto moved = run(placed(x, mesh, {a}).requires_grad_(), placed(y, mesh, {b}).requires_grad_());
            for (size_t i = 0; i < plain.size(); ++i) {
              if (plain[i].defined()) EXPECT_TENSORS_CLOSE(whole_detached(moved[i]), plain[i].detach(), 1e-9, 1e-9) << i;
            }
          }
        }
      }
    }
  }
}

// --- programs that run amid derivative formulas -------------------------------------------------------------------------------

/// A formula asks for the second run, in which what the function writes keeps its placement as it did in the first.
TEST(Gradients, OfAFunctionThatRunsAgainAndWrites) {
  const auto mesh = line_mesh();
  const Placements everywhere{Replicate{}};
  const auto left = placed(draw({8, 8}, 2), mesh, {Shard{1}}), right = placed(draw({8, 8}, 3), mesh, {Shard{0}});
  const auto function = [&](const Tensor& x) -> Tensor {
    auto y = x * 1.0;
    y.add_(x.mm(left).mm(right));
    const auto local = to_local(y);
    return from_local(local * local, mesh, everywhere);
  };
  const auto gradient = [&](bool again) {
    const auto x = placed(draw({4, 8}, 1), mesh, everywhere).requires_grad_();
    return whole_detached(grad({(again ? recompute(function, x) : function(x)).sum()}, {x})[0]);
  };
  EXPECT_TENSORS_CLOSE(gradient(true), gradient(false), 1e-9, 1e-9);
}

/// A hook runs where the formula of its tensor's node will, and its tensors are none that the formula makes.
TEST(Gradients, HooksWriteTensorsOfTheProgram) {
  const auto mesh = line_mesh();
  const auto zeros = torch::zeros({4, 8}, torch::kDouble), weight = draw({8, 8}, 2);
  auto sum = placed(zeros, mesh, {Replicate{}});
  auto log = torch::zeros({}, sum.options());
  const auto mask = torch::ones({4, 8}, sum.options());
  const auto h = placed(draw({4, 8}, 1), mesh, {Replicate{}}).requires_grad_().tanh();
  h.register_hook([&](const Tensor& gradient) {
    if (world_size() > 1) EXPECT_EQ(DTensor(gradient).placements(), Placements{Partial{}});
    sum.add_(gradient);
    EXPECT_THROWS_WITH(log.add_(gradient.abs().sum()), "the written argument 'self' is a plain tensor");
    EXPECT_THROWS_WITH(gradient * mask, "cannot be mixed with DTensors");
    EXPECT_THROWS_WITH(gradient + mask, "cannot be mixed with DTensors");
  });
  h.mm(placed(weight, mesh, {Shard{1}})).sum().backward();
  EXPECT_EQ(DTensor(sum).placements(), Placements{Replicate{}});
  EXPECT_TENSORS_CLOSE(whole_detached(sum), (zeros + 1).mm(weight.t()), 1e-9, 1e-9);
  EXPECT_FALSE(is_dtensor(log));
}

/// The formula of cat makes plain zeros, to which autograd adds in place.
TEST(Gradients, OfAnEmptyTensorThatIsUsedTwice) {
  const auto mesh = line_mesh();
  const auto empty = placed(draw({0}, 1), mesh, {Shard{0}}).requires_grad_();
  const auto product = empty * placed(draw({0}, 2), mesh, {Shard{0}});
  const auto joined = torch::cat({empty, placed(draw({3}, 3), mesh, {Shard{0}})});
  (product.sum() + joined.sum()).backward();
  EXPECT_EQ(DTensor(empty.grad()).placements(), Placements{Shard{0}});
}

/// What tells a program's forward from a formula, where both run in grad mode.
struct OwnNode : torch::autograd::Node {
  using Node::Node;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const at::AutoGradMode grad_mode(true);
    nested_forward = internal::dispatch::in_nested_forward();
    return std::move(gradients);
  }
  bool nested_forward = false;
};

TEST(Gradients, AProgramsOwnNodeRunsAForward) {
  const auto leaf = torch::ones({2}).requires_grad_();
  const auto node = std::make_shared<OwnNode>(torch::autograd::collect_next_edges(leaf));
  auto y = torch::ones({2});
  torch::autograd::create_gradient_edge(y, node);
  bool in_hook = false;
  y.register_hook([&](const Tensor&) {
    const at::AutoGradMode grad_mode(true);
    in_hook = internal::dispatch::in_nested_forward();
  });
  y.sum().backward();
  EXPECT_TRUE(node->nested_forward);
  EXPECT_TRUE(in_hook);
}

// --- the second order of formulas ---------------------------------------------------------------------------------------------

/// In double backward, PyTorch's formulas make zeros of their own, as they do in the first.
Tensor redistributed(const Tensor& x) { return is_dtensor(x) ? Tensor(DTensor(x).redistribute({Replicate{}})) : x; }

Tensor remade(const Tensor& x) {
  if (!is_dtensor(x)) return x;
  const DTensor dtensor(x);
  return from_local(to_local(dtensor), dtensor.mesh(), dtensor.placements(), x.sizes().vec());
}

TEST(SecondOrder, OfOperatorsWhoseFormulasMakePlainZeros) {
  using Function = Tensor (*)(const Tensor&);
  const std::pair<const char*, Function> kOperators[]{
      {"max along a dim", [](const Tensor& x) { return std::get<0>(x.max(0)); }},
      {"sort", [](const Tensor& x) { return std::get<0>(x.sort(1)); }},
      {"topk", [](const Tensor& x) { return std::get<0>(x.topk(2, 0)); }},
      {"unbind", [](const Tensor& x) { return x.unbind(0)[1]; }},
      {"split", [](const Tensor& x) { return x.split(2, 0)[1]; }},
      {"select", [](const Tensor& x) { return x.select(1, 0); }},
      {"gather", [](const Tensor& x) { return std::get<0>(x.kthvalue(2, 0)); }},
      {"abs", [](const Tensor& x) { return x.abs() + x; }},
      {"cumprod", [](const Tensor& x) { return x.cumprod(0); }},
      {"prod", [](const Tensor& x) { return x.prod(0); }},
      {"abs after redistribute", [](const Tensor& x) { return redistributed(x).abs(); }},
      {"abs after from_local", [](const Tensor& x) { return remade(x).abs(); }},
      {"cat of nothing after redistribute",
       [](const Tensor& x) {
         return torch::cat({redistributed(x.narrow(0, 0, 0).flatten()), x.flatten()});
       }},
      {"cat of nothing after from_local",
       [](const Tensor& x) {
         return torch::cat({remade(x.narrow(0, 0, 0).flatten()), x.flatten()});
       }},
  };
  const auto mesh = line_mesh();
  const auto whole = draw({5, 3}, 1);
  for (const auto& [name, function] : kOperators) {
    const auto cubed = [function = function](const Tensor& x) { return function(x.pow(3)); };
    const auto plain =
        to_the_second_order(whole.clone().requires_grad_(), cubed, [](const Tensor& y) { return draw(y.sizes(), 2); });
    for (const auto& placement : whole_placements({5, 3}, mesh.size())) {
      SCOPED_TRACE(::testing::Message() << name << " " << placement);
      const auto moved = to_the_second_order(placed(whole, mesh, {placement}).requires_grad_(), cubed,
                                             [&](const Tensor& y) { return placed(draw(y.sizes(), 2), mesh, {Replicate{}}); });
      for (size_t order = 0; order < 3; ++order) EXPECT_TENSORS_CLOSE(moved[order], plain[order], 1e-9, 1e-9) << order;
    }
  }
}

} // namespace
} // namespace tessera::testing::gradients_test
