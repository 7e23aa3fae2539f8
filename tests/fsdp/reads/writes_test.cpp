// Writes to sharded parameters, in every way and at every time that a program may choose: they have the effect that they have on
// an unsharded model, and autograd refuses what it refuses there.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/activations/saved_tensors.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::writes_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct Write {
  std::string name;
  std::function<void(Tensor)> apply;
};

/// On the device of `p`, as the two below.
Tensor of_ones(const Tensor& p, c10::IntArrayRef sizes) {
  return torch::ones(sizes, torch::dtype(torch::kDouble).device(p.device()));
}
Tensor on_diagonal(const Tensor& p) { return torch::eye(4).to(p.device(), torch::kBool); }
Tensor index_of(const Tensor& p, torch::detail::TensorDataContainer values) { return torch::tensor(values).to(p.device()); }

/// Of a square weight, [4, 4].
std::vector<Write> writes() {
  return {
      {"mul_", [](Tensor p) { p.mul_(.7); }},
      {"copy_",
       [](Tensor p) {
         p.copy_(of_ones(p, {4, 4}));
       }},
      {"constant_", [](Tensor p) { nn::init::constant_(p, .2); }},
      {"eye_", [](Tensor p) { nn::init::eye_(p); }},
      {"index_put_",
       [](Tensor p) {
         p.index_put_({index_of(p, {2, 0})}, of_ones(p, {1, 4}));
       }},
      {"index_fill_", [](Tensor p) { p.index_fill_(0, index_of(p, {1}), .2); }},
      {"index_fill_ of a column", [](Tensor p) { p.index_fill_(1, index_of(p, {1}), .2); }},
      {"index_add_",
       [](Tensor p) {
         p.index_add_(0, index_of(p, {1}), of_ones(p, {1, 4}));
       }},
      {"index_copy_",
       [](Tensor p) {
         p.index_copy_(0, index_of(p, {3, 1}), of_ones(p, {2, 4}));
       }},
      {"index_copy_ of its own rows",
       [](Tensor p) {
         p.index_copy_(0, index_of(p, {3, 1}), p.detach().square().narrow(0, 1, 2));
       }},
      {"masked_fill_ by its values", [](Tensor p) { p.masked_fill_(p > 0, 0); }},
      {"masked_fill_", [](Tensor p) { p.masked_fill_(on_diagonal(p), .2); }},
      {"masked_scatter_", [](Tensor p) { p.masked_scatter_(on_diagonal(p), of_ones(p, {4})); }},
      {"scatter_",
       [](Tensor p) {
         p.scatter_(0, index_of(p, {{1, 0, 2, 3}}), of_ones(p, {1, 4}));
       }},
      {"scatter_add_",
       [](Tensor p) {
         p.scatter_add_(1, index_of(p, {{1}, {0}}), of_ones(p, {2, 1}));
       }},
      {"fill_diagonal_", [](Tensor p) { p.fill_diagonal_(.2); }},
      {"view.mul_",
       [](Tensor p) {
         p.view({4, 4}).mul_(.7);
       }},
      {"select.fill_", [](Tensor p) { p.select(0, 0).fill_(.3); }},
      {"[] =", [](Tensor p) { p[1] = .3; }},
      {"slice.mul_", [](Tensor p) { p.slice(0, 0, 2).mul_(.3); }},
      {"slice.copy_",
       [](Tensor p) {
         p.slice(0, 0, 2).copy_(of_ones(p, {2, 4}));
       }},
      {"t.mul_", [](Tensor p) { p.t().mul_(.2); }},
      {"diagonal.fill_", [](Tensor p) { p.diagonal().fill_(.2); }},
      {"foreach of views",
       [](Tensor p) {
         torch::_foreach_mul_({p[0], p[1]}, .5);
       }},
      {"detach.mul_", [](Tensor p) { p.detach().mul_(.7); }},
      {"detach.copy_",
       [](Tensor p) {
         p.detach().copy_(of_ones(p, {4, 4}));
       }},
      {"detach[].fill_", [](Tensor p) { p.detach()[0].fill_(.2); }},
      {"detach.index_fill_", [](Tensor p) { p.detach().index_fill_(0, index_of(p, {1}), .2); }},
      {"data.mul_", [](Tensor p) { p.data().mul_(.7); }},
      {"data[].fill_", [](Tensor p) { p.data()[0].fill_(.2); }},
      {"data.index_fill_", [](Tensor p) { p.data().index_fill_(0, index_of(p, {1}), .2); }},
      {"variable_data.mul_", [](Tensor p) { p.variable_data().mul_(.7); }},
  };
}

std::vector<Strategy> chosen_strategies() {
  std::vector<Strategy> chosen;
  for (const auto& strategy : strategies()) {
    const bool hybrid = strategy.name.starts_with("hybrid") && !strategy.name.starts_with("hybrid of");
    if (strategy.name.starts_with("full") || hybrid || strategy.replicates) chosen.push_back(strategy);
  }
  return chosen;
}

/// Two layers, each a group; `strategy` is null for the unsharded twin, which takes all ranks' rows.
struct Layers {
  explicit Layers(const Strategy* strategy) : is_sharded(strategy != nullptr) {
    torch::manual_seed(1);
    a = nn::Linear(4, 4);
    b = nn::Linear(4, 4);
    for (auto* layer : {&a, &b}) {
      (*layer)->to(torch::kDouble);
      if (!strategy) continue;
      strategy->replicates ? replicate(**layer, strategy->mesh(), strategy->options)
                           : fully_shard(*layer, strategy->mesh(), strategy->options);
    }
    x = torch::randn({12, 4}, torch::kDouble);
    if (strategy) x = part_of(x, world_rank(), world_size()).to(test_device());
  }
  std::vector<Tensor> parameters() const { return {a->weight, a->bias, b->weight, b->bias}; }
  bool is_sharded;
  nn::Linear a{nullptr}, b{nullptr};
  Tensor x;
};

void expect_same_state(Layers& sharded, Layers& plain) {
  const torch::NoGradGuard no_grad;
  const auto expected = plain.parameters(), got = sharded.parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TENSORS_CLOSE(full(got[i]), expected[i].detach(), 1e-12, 1e-12);
    ASSERT_EQ(got[i].grad().defined(), expected[i].grad().defined());
    if (got[i].grad().defined()) EXPECT_TENSORS_CLOSE(full(got[i].grad()), expected[i].grad(), 1e-12, 1e-12);
  }
  const auto row = of_ones(plain.x, {1, 4});
  EXPECT_TENSORS_CLOSE(sharded.b(row.to(sharded.x.device())), plain.b(row), 1e-12, 1e-12);
}

/// Runs `run` on both twins, and expects the same error or none, and the same parameters, gradients and next forward.
void expect_as_unsharded(const Strategy& strategy, const std::function<void(Layers&)>& run) {
  Layers plain(nullptr), sharded(&strategy);
  const std::string refusal = "has been modified by an inplace operation";
  const auto expected = error_of([&] { run(plain); });
  const auto got = error_of([&] { run(sharded); });
  if (expected.find(refusal) != std::string::npos) {
    EXPECT_NE(got.find(refusal), std::string::npos) << got;
  } else {
    EXPECT_EQ(got, expected);
    expect_same_state(sharded, plain);
  }
}

struct InBackward : torch::autograd::Function<InBackward> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const std::function<void()>* write) {
    context->saved_data["write"] = reinterpret_cast<int64_t>(write);
    return x * 1.0;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<const std::function<void()>*>(context->saved_data["write"].toInt()))();
    return {gradients[0], Tensor()};
  }
};

struct Time {
  std::string name;
  std::function<void(Layers&, const std::function<void()>& write)> run;
};

/// When b's weight is written.
std::vector<Time> times() {
  return {{"outside", [](Layers&, const std::function<void()>& write) { write(); }},
          {"in a hook",
           [](Layers& layers, const std::function<void()>& write) {
             layers.b(layers.x);
             const auto y = layers.a(layers.x).tanh();
             y.register_hook([&](const Tensor& gradient) {
               write();
               return gradient;
             });
             y.square().mean().backward();
           }},
          {"in a hook, behind its own gradient",
           [](Layers& layers, const std::function<void()>& write) {
             const auto h = layers.a(layers.x).tanh();
             h.register_hook([&](const Tensor& gradient) {
               write();
               return gradient;
             });
             layers.b(h).square().mean().backward();
           }},
          {"in the backward of a Function", [](Layers& layers, const std::function<void()>& write) {
             InBackward::apply(layers.a(layers.x).tanh(), &write).square().mean().backward();
           }}};
}

TEST(Writes, ReachTheShardAtAnyTime) {
  for (const auto& strategy : chosen_strategies()) {
    for (const auto& time : times()) {
      for (const auto& write : writes()) {
        SCOPED_TRACE(strategy.name + ": " + write.name + " " + time.name);
        expect_as_unsharded(strategy, [&](Layers& layers) {
          time.run(layers, [&] {
            const torch::NoGradGuard no_grad;
            write.apply(layers.b->weight);
          });
        });
      }
    }
  }
}

/// With plain indices, masks and values as those of parameters, the same on every rank. Left out are writes to views of a
/// gradient that would have to move, which are errors (docs/limits.md).
TEST(Writes, ToGradientsAreAsToParameters) {
  for (const auto& strategy : chosen_strategies()) {
    for (const auto& write : writes()) {
      if (write.name == "t.mul_" || write.name == "diagonal.fill_") continue;
      SCOPED_TRACE(strategy.name + ": " + write.name);
      expect_as_unsharded(strategy, [&](Layers& layers) {
        layers.b(layers.a(layers.x).tanh()).square().mean().backward();
        const torch::NoGradGuard no_grad;
        write.apply(layers.b->weight.grad());
      });
    }
  }
}

struct SavesWeight : torch::autograd::Function<SavesWeight> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.matmul(weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].matmul(saved[1]), gradients[0].t().matmul(saved[0])};
  }
};

/// Autograd saves the weight, and refuses it when it has another version in backward.
TEST(Writes, BetweenForwardAndBackwardAreRefusedAsUnsharded) {
  using Use = std::pair<std::string, std::function<Tensor(const Tensor& x, const Tensor& weight)>>;
  const std::vector<Use> uses{{"itself", [](const Tensor& x, const Tensor& weight) { return torch::linear(x, weight); }},
                              {"detach()", [](const Tensor& x, const Tensor& w) { return torch::linear(x, w.detach()); }},
                              {"data()", [](const Tensor& x, const Tensor& w) { return torch::linear(x, w.data()); }},
                              {"a view", [](const Tensor& x, const Tensor& w) { return x.matmul(w.slice(0, 1).t()); }},
                              {"a Function's", [](const Tensor& x, const Tensor& w) { return SavesWeight::apply(x, w); }}};
  for (const auto& strategy : chosen_strategies()) {
    for (const auto& [use, apply] : uses) {
      for (const auto& write : writes()) {
        SCOPED_TRACE(strategy.name + ": " + write.name + " where the forward read " + use);
        expect_as_unsharded(strategy, [&, &forward = apply](Layers& layers) {
          const auto loss = forward(layers.a(layers.x).tanh(), layers.b->weight).square().mean();
          {
            const torch::NoGradGuard no_grad;
            write.apply(layers.b->weight);
          }
          loss.backward();
        });
      }
    }
  }
}

struct Mixed : torch::nn::Module {
  Tensor forward(const Tensor& x, const std::function<void()>& in_backward) {
    auto normal = b(a(x).to(torch::kDouble));
    if (in_backward) normal.register_hook([in_backward](const Tensor&) { in_backward(); });
    return c(normal);
  }
  torch::nn::Linear a{register_module("a", torch::nn::Linear(3, 6))};
  torch::nn::BatchNorm1d b{register_module("b", torch::nn::BatchNorm1d(6))};
  torch::nn::Linear c{register_module("c", torch::nn::Linear(6, 2))};
};

/// Whatever is computed in, and in a hook of the backward too.
TEST(Writes, BetweenForwardAndBackwardAreRefusedUnderAPolicy) {
  for (const auto& strategy : chosen_strategies()) {
    for (const bool keeps : {false, true}) {
      for (const std::string written : {"a.weight", "b.weight", "in hook a.weight", "in hook b.weight"}) {
        SCOPED_TRACE(strategy.name + (keeps ? ", kept: " : ": ") + written);
        torch::manual_seed(0);
        Mixed net;
        net.to(torch::kDouble);
        auto options = strategy.options;
        options.reshard_after_forward = !keeps;
        fully_shard(*net.b, strategy.mesh(), options);
        options.mixed_precision.param_dtype = torch::kFloat;
        fully_shard(*net.a, strategy.mesh(), options);
        fully_shard(*net.c, strategy.mesh(), options);
        fully_shard(net, strategy.mesh(), options);
        auto x = torch::ones({4, 3}, test_device()).requires_grad_();
        const bool in_hook = written.substr(0, 2) == "in";
        const auto write = [&] {
          const torch::NoGradGuard no_grad;
          auto weight = net.named_parameters()[in_hook ? written.substr(8) : written];
          weight.copy_(weight * 1);
        };
        const auto loss = net.forward(x, in_hook ? std::function<void()>(write) : nullptr).square().mean();
        if (!in_hook) write();
        EXPECT_THROWS_WITH(loss.backward(), "modified by an inplace operation");
      }
    }
  }
}

Tensor part_of_parameter(const Tensor& p) { return is_dtensor(p) ? to_local(p) : p.view_as(p); }

/// The parts of a group lie in one buffer, and count their versions each for itself.
/// Writes to one of the parameters after the part of `b.weight`, parameter 2, was saved, and before the backward.
void write_before_backward(const std::vector<Write>& writes, const std::vector<size_t>& parameters) {
  for (const auto& strategy : chosen_strategies()) {
    for (const auto& write : writes) {
      for (const size_t written : parameters) {
        SCOPED_TRACE(strategy.name + ": " + write.name + " of parameter " + std::to_string(written));
        expect_as_unsharded(strategy, [&](Layers& layers) {
          const auto loss = part_of_parameter(layers.b->weight).square().sum();
          {
            const torch::NoGradGuard no_grad;
            write.apply(layers.parameters()[written]);
          }
          loss.backward();
        });
      }
    }
  }
}

/// What stays where it is, as sharded parameters do, is watched there too.
TEST(Writes, BetweenForwardAndBackwardAreRefusedWhereSavedTensorsLieElsewhere) {
  // Of a device it copies what is never freed, as of an unsharded model, and backward computes with the copy.
  if (!tests_the_cpu()) GTEST_SKIP() << "the host's memory copies nothing of the CPU alone";
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    Tensor loss;
    {
      const auto scope = saved_tensors_in(host_memory());
      loss = loss_of(net, own_batch(0));
    }
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : (*net->blocks)[1]->parameters()) parameter.mul_(2);
    }
    EXPECT_THROWS_WITH(loss.backward(), "was modified by an inplace operation");
  }
}

TEST(Writes, RefuseTheBackwardsAloneThatSavedWhatIsWritten) {
  const std::vector<Write> of_any_size{
      {"mul_", [](Tensor p) { p.mul_(.7); }},
      {"foreach", [](Tensor p) { torch::_foreach_mul_({p}, .7); }},
      {"detach.mul_", [](Tensor p) { p.detach().mul_(.7); }},
      {"of its part", [](Tensor p) { part_of_parameter(p).mul_(.7); }},
      {"of a part of its part", [](Tensor p) { part_of_parameter(p).view({-1}).mul_(.7); }},
  };
  write_before_backward(of_any_size, {0, 1, 2, 3});
}

/// A view of one parameter is written back without a trace in the others of its group.
TEST(Writes, ThroughViewsRefuseNoBackwardOfOthers) {
  const std::vector<Write> through_views{
      {"view.mul_", [](Tensor p) { p.view({-1}).mul_(.7); }},
      {"select.fill_", [](Tensor p) { p.select(0, 0).fill_(.7); }},
      {"of the whole", [](Tensor p) { (is_dtensor(p) ? tessera::unsharded(p) : p).mul_(.7); }},
  };
  write_before_backward(through_views, {0, 1, 3});
}

/// A hook's plain tensors are not the temporaries of a derivative formula, which are the same on every rank.
TEST(Writes, OfPlainTensorsAreRefusedAtAnyTime) {
  const std::vector<Write> of_plain{{"add_",
                                     [](Tensor p) {
                                       p.add_(of_ones(p, {4, 4}));
                                     }},
                                    {"foreach lerp_",
                                     [](Tensor p) {
                                       torch::_foreach_lerp_({p}, {of_ones(p, {4, 4})}, {of_ones(p, {4, 4})});
                                     }},
                                    {"foreach addcdiv_", [](Tensor p) {
                                       torch::_foreach_addcdiv_({p}, {of_ones(p, {4, 4})}, {of_ones(p, {4, 4})});
                                     }}};
  for (const auto& strategy : chosen_strategies()) {
    for (const auto& time : times()) {
      for (const auto& write : of_plain) {
        SCOPED_TRACE(strategy.name + ": " + write.name + " " + time.name);
        Layers layers(&strategy);
        const auto error = error_of([&] {
          time.run(layers, [&] {
            const torch::NoGradGuard no_grad;
            write.apply(layers.b->weight);
          });
        });
        EXPECT_NE(error.find("a plain tensor of shape [4, 4]"), std::string::npos) << error;
      }
    }
  }
}

TEST(Writes, ToViewsOfSeveralGroupsReachThemAll) {
  for (const auto& strategy : chosen_strategies()) {
    SCOPED_TRACE(strategy.name);
    expect_as_unsharded(strategy, [](Layers& layers) {
      const torch::NoGradGuard no_grad;
      torch::_foreach_mul_({layers.a->weight[1], layers.b->weight[2]}, .5);
    });
  }
}

/// Of lists of the two weights, in which later elements read what earlier ones write.
std::vector<std::pair<std::string, std::function<void(Tensor w, Tensor v)>>> dependent_list_writes() {
  return {{"add_ of the transposed",
           [](Tensor w, Tensor v) {
             torch::_foreach_add_({w, v}, {v.t(), w.t()});
           }},
          {"views of the written",
           [](Tensor w, Tensor v) {
             torch::_foreach_add_({w[1], v, w.t()}, {v[0], w.t(), v});
           }},
          {"one weight twice",
           [](Tensor w, Tensor v) {
             torch::_foreach_mul_({w, w, v}, {v.t(), v, w});
           }},
          {"addcmul_ by a list of numbers",
           [](Tensor w, Tensor v) {
             torch::_foreach_addcmul_({w, v}, {v.t(), w.t()}, {v, w}, std::vector<at::Scalar>{.5, 2});
           }},
          {"addcmul_ of views by a tensor of numbers",
           [](Tensor w, Tensor v) {
             torch::_foreach_addcmul_({w.t(), v.t()}, {v, w}, {v, w}, torch::tensor({.5, 2.}, torch::kDouble));
           }},
          {"sums of rows", [](Tensor w, Tensor v) {
             torch::_foreach_add_({w, v, w}, {v.sum(0), w, v.t()});
           }}};
}

TEST(Writes, AnElementOfAListSeesWhatThoseBeforeItWrote) {
  for (const auto& strategy : chosen_strategies()) {
    for (const auto& [name, apply] : dependent_list_writes()) {
      SCOPED_TRACE(strategy.name + ": " + name);
      expect_as_unsharded(strategy, [&, &write = apply](Layers& layers) {
        const torch::NoGradGuard no_grad;
        write(layers.a->weight, layers.b->weight);
      });
    }
  }
}

/// A view that is a copy cannot be written: the views of parameters beside it are not written then.
TEST(Writes, BesideACopyThatCannotBeWrittenChangeNothing) {
  if (world_size() == 1) GTEST_SKIP() << "one rank copies no view";
  for (const auto& strategy : chosen_strategies()) {
    SCOPED_TRACE(strategy.name);
    Layers layers(&strategy), unchanged(nullptr);
    std::vector<int64_t> extents(world_size(), 0);
    extents.back() = 4;
    const auto mesh = strategy.replicates ? world_mesh() : strategy.mesh();
    Placements placements(mesh.ndim());
    placements.back() = RaggedShard{0, {extents.end() - mesh.size(mesh.ndim() - 1), extents.end()}};
    const torch::NoGradGuard no_grad;
    const Tensor other = distribute_tensor(torch::ones({4, 4}, torch::kDouble).to(test_device()), mesh, placements);
    auto copy = other.t(), view = layers.a->weight.t();
    const auto row = view.select(0, 1), row_of_copy = copy.select(0, 1);
    if (mesh.size(mesh.ndim() - 1) == 1) continue; // nothing moves
    EXPECT_THROWS_WITH(torch::_foreach_mul_({view, copy}, .5), "writing into it would not reach the original");
    EXPECT_THROWS_WITH(torch::_foreach_mul_({copy, view}, .5), "writing into it would not reach the original");
    auto smallest = row, largest = row_of_copy;
    EXPECT_THROWS_WITH(torch::aminmax_out(smallest, largest, other, 0), "writing into it would not reach the original");
    expect_same_state(layers, unchanged);
  }
}

/// One operator over two models that have no common root.
TEST(Reads, OfTwoModelsKeepTheGroupsOfBoth) {
  for (const auto& strategy : chosen_strategies()) {
    SCOPED_TRACE(strategy.name);
    torch::manual_seed(0);
    std::vector<torch::nn::Sequential> plain, models;
    for (int model = 0; model < 2; ++model) {
      plain.emplace_back(torch::nn::Linear(4, 3), torch::nn::Linear(4, 3), torch::nn::Linear(4, 2));
      models.emplace_back(std::dynamic_pointer_cast<torch::nn::SequentialImpl>(plain.back()->clone()));
      for (auto& layer : *models.back()) fully_shard(*layer.ptr(), strategy.mesh(), strategy.options);
      fully_shard(*models.back(), strategy.mesh(), strategy.options);
    }
    const auto loss = [](std::vector<torch::nn::Sequential>& of) {
      std::vector<Tensor> weights;
      for (size_t layer = 0; layer < 3; ++layer) {
        for (auto& model : of) weights.push_back(model->ptr(layer)->named_parameters()["weight"]);
      }
      return torch::cat(weights).square().sum();
    };
    const auto expected = loss(plain), actual = loss(models);
    EXPECT_TENSORS_CLOSE(actual.detach().cpu(), expected.detach(), 1e-5, 1e-5);
    expected.backward();
    actual.backward();
    for (size_t model = 0; model < 2; ++model) {
      for (const auto& item : plain[model]->named_parameters()) {
        if (!item.value().grad().defined()) continue;
        EXPECT_TENSORS_CLOSE(full(models[model]->named_parameters()[item.key()].grad()), item.value().grad(), 1e-5, 1e-5);
      }
    }
  }
}

/// The second layer's weight does not lie at the start of its group's storage.
TEST(Writes, CountAStorageOffsetFromTheFirstElement) {
  const std::vector<Write> strided{{"fill_diagonal_", [](Tensor p) { p.fill_diagonal_(.2); }},
                                   {"detach().fill_diagonal_", [](Tensor p) { p.detach().fill_diagonal_(.2); }},
                                   {"data().fill_diagonal_", [](Tensor p) { p.data().fill_diagonal_(.2); }},
                                   {"as_strided", [](Tensor p) { p.as_strided({3}, {5}).fill_(.2); }},
                                   {"as_strided from 1", [](Tensor p) { p.as_strided({3}, {5}, 1).fill_(.2); }},
                                   {"a view's as_strided", [](Tensor p) {
                                      auto row = p[1];
                                      row.as_strided({2}, {2}, row.storage_offset() + 1).fill_(.2);
                                    }}};
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    for (const auto& write : strided) {
      SCOPED_TRACE(write.name + " in layout " + std::to_string(static_cast<int>(layout)));
      Layers plain(nullptr), sharded(nullptr);
      fully_shard({sharded.a.ptr(), sharded.b.ptr()}, world_mesh(), {.layout = layout});
      sharded.x = sharded.x.to(test_device());
      const auto run = [&](Layers& layers) {
        const torch::NoGradGuard no_grad;
        write.apply(layers.b->weight);
        return layers.x.narrow(1, 0, 2).matmul(layers.b->weight.as_strided({2, 3}, {3, 1}, 1));
      };
      const auto expected = run(plain), got = run(sharded);
      EXPECT_TENSORS_CLOSE(got, expected, 1e-12, 1e-12);
      expect_same_state(sharded, plain);
    }
  }
}

TEST(Writes, ToPlacesReturnTheParameter) {
  torch::nn::Linear linear(4, 4);
  fully_shard(linear, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(linear->weight.index_fill_(0, index_of(linear->weight, {1}), 2).is_same(linear->weight));
  EXPECT_TENSORS_EQUAL(full(linear->weight)[1], torch::full({4}, 2.f));
}

} // namespace
} // namespace tessera::testing::writes_test
