// Backwards that end with an exception, and those that run inside another's hook: what comes after is as in the unsharded model.
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/group/parameter_group.h>

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::failed_backward_test {
namespace {

using torch::Tensor;

/// Two layers, each a group of its own or both in one, and another model beside them. Sharded or not.
struct Models {
  Models(const Strategy* strategy, bool layers_apart) {
    torch::manual_seed(5);
    model = torch::nn::Sequential(torch::nn::Linear(5, 4), torch::nn::Tanh(), torch::nn::Linear(4, 3));
    other = torch::nn::Linear(5, 3);
    model->to(torch::kDouble);
    other->to(torch::kDouble);
    if (!strategy) return;
    const auto mesh = strategy->mesh();
    const auto shard = [&](torch::nn::Module& module) {
      strategy->replicates ? replicate(module, mesh, strategy->options) : fully_shard(module, mesh, strategy->options);
    };
    if (layers_apart) shard(first()), shard(last());
    shard(*model);
    shard(*other);
    is_sharded = true;
  }
  torch::nn::LinearImpl& first() { return *model[0]->as<torch::nn::Linear>(); }
  torch::nn::LinearImpl& last() { return *model[2]->as<torch::nn::Linear>(); }

  /// The same 12 rows for every `batch`, or this rank's part of them.
  Tensor input(int64_t batch) const {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(batch));
    const auto rows = torch::randn({12, 5}, generator, torch::kDouble);
    return is_sharded ? part_of(rows, world_rank(), world_size()).to(test_device()) : rows;
  }
  Tensor loss(int64_t batch) { return model->forward(input(batch)).square().mean(); }
  Tensor other_loss(int64_t batch) { return other(input(batch)).square().mean(); }
  void zero_grad() {
    model->zero_grad();
    other->zero_grad();
  }
  std::vector<Tensor> gradients() {
    std::vector<Tensor> all;
    for (const auto& parameters : {model->parameters(), other->parameters()}) {
      for (const auto& parameter : parameters)
        all.push_back(parameter.grad().defined() ? full(parameter.grad()).clone() : Tensor());
    }
    return all;
  }

  torch::nn::Sequential model{nullptr};
  torch::nn::Linear other{nullptr};
  bool is_sharded = false;
};

/// Where the exception is thrown, from the first gradient to the last.
enum class At { kOutput, kHidden, kFirstLayer };

void throw_in(const Tensor& tensor) {
  tensor.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("thrown in backward"); });
}

/// A loss whose backward throws every time; with kOutput before any gradient has landed.
Tensor bad_loss(Models& models, int64_t batch, At at = At::kHidden) {
  const auto before = models.first().forward(models.input(batch));
  const auto hidden = before.tanh();
  const auto output = models.last().forward(hidden);
  throw_in(at == At::kOutput ? output : at == At::kHidden ? hidden : before);
  return output.square().mean();
}

void fail(const Tensor& loss, bool retain_graph = false) {
  EXPECT_NE(error_of([&] { loss.backward({}, retain_graph); }).find("thrown in backward"), std::string::npos);
}

struct Scenario {
  std::string name;
  std::function<void(Models&)> run; ///< the gradients after it are compared
};

Scenario at(const std::string& name, At at, const std::function<void(Models&, At)>& run) {
  const char* const places[] = {" (output)", " (hidden)", " (first layer)"};
  return {name + places[static_cast<size_t>(at)], [at, run](Models& models) { run(models, at); }};
}

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all{
      {"the same graph again, retained",
       [](Models& models) {
         int calls = 0;
         const auto hidden = models.first().forward(models.input(0)).tanh();
         hidden.register_hook([&](const Tensor& gradient) {
           if (calls++ == 0) throw std::runtime_error("thrown in backward");
           return gradient;
         });
         const auto loss = models.last().forward(hidden).square().mean();
         fail(loss, /*retain_graph=*/true);
         models.zero_grad();
         loss.backward();
       }},
      {"the same graph again, of which nothing was used",
       [](Models& models) {
         int calls = 0;
         const auto loss = models.loss(0) * 1;
         loss.register_hook([&](const Tensor& gradient) {
           if (calls++ == 0) throw std::runtime_error("thrown in backward");
           return gradient;
         });
         fail(loss);
         loss.backward();
       }},
      {"the same graph again, half used, is an error, and the next is right",
       [](Models& models) {
         const auto second = models.loss(1);
         const auto loss = bad_loss(models, 0);
         fail(loss);
         EXPECT_THROWS_WITH(loss.backward(), "Trying to backward through the graph a second time");
         models.zero_grad();
         second.backward();
       }},
      {"an accumulation goes on",
       [](Models& models) {
         models.loss(0).backward();
         const auto third = models.loss(2);
         fail(bad_loss(models, 1, At::kOutput));
         third.backward();
       }},
      {"another model in a hook",
       [](Models& models) {
         const auto older = models.other_loss(2);
         const auto output = models.other(models.input(1));
         throw_in(output);
         fail(output.sum());
         const auto loss = models.loss(0) * 1;
         loss.register_hook([&](const Tensor& gradient) {
           const torch::AutoGradMode grad_mode(true);
           models.other_loss(3).backward();
           EXPECT_TRUE(models.other->weight.grad().defined());
           return gradient;
         });
         loss.backward();
         older.backward();
       }},
      {"failures in a hook, which the hook catches",
       [](Models& models) {
         const auto loss = models.loss(0) * 1;
         loss.register_hook([&](const Tensor& gradient) {
           const torch::AutoGradMode grad_mode(true);
           fail(bad_loss(models, 1)); // what has landed stays
           const auto output = models.other(models.input(1));
           throw_in(output);
           fail(output.sum());
           return gradient;
         });
         loss.backward();
         models.other_loss(2).backward();
       }},
      {"a failure of the outer one after one in its hook",
       [](Models& models) {
         const auto second = models.loss(2) + models.other_loss(2);
         const auto hidden = models.first().forward(models.input(0)).tanh();
         hidden.register_hook([&](const Tensor&) -> Tensor {
           const torch::AutoGradMode grad_mode(true);
           (models.loss(1) + models.other_loss(1)).backward();
           throw std::runtime_error("thrown in backward");
         });
         fail(models.last().forward(hidden).square().mean());
         models.zero_grad();
         second.backward();
       }},
      {"a failure of a parameter's hook",
       [](Models& models) {
         const auto second = models.loss(1);
         const auto weight = models.last().weight;
         const auto hook = weight.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("thrown in backward"); });
         fail(models.loss(0));
         weight.remove_hook(hook);
         models.zero_grad();
         second.backward();
       }},
      {"gradients of inputs come next",
       [](Models& models) {
         auto x = models.input(0).requires_grad_();
         const auto output = models.model->forward(x).sum();
         const auto third = models.loss(2);
         fail(bad_loss(models, 1));
         models.zero_grad();
         EXPECT_TRUE(torch::autograd::grad({output}, {x})[0].defined());
         third.backward();
       }},
  };
  for (const auto place : {At::kOutput, At::kHidden, At::kFirstLayer}) {
    all.push_back(at("the graph of a second forward", place, [](Models& models, At at) {
      const auto bad = bad_loss(models, 0, at);
      const auto second = models.loss(1);
      fail(bad);
      models.zero_grad();
      second.backward();
    }));
    all.push_back(at("a graph retained from before", place, [](Models& models, At at) {
      const auto loss = models.loss(0);
      loss.backward({}, /*retain_graph=*/true);
      fail(bad_loss(models, 1, at));
      models.zero_grad();
      loss.backward();
    }));
    all.push_back(at("two failures in a row, then training", place, [](Models& models, At at) {
      const auto third = models.loss(2);
      fail(bad_loss(models, 0, at));
      fail(bad_loss(models, 1, at));
      models.zero_grad();
      third.backward();
      torch::optim::SGD(models.model->parameters(), 0.1).step();
      models.loss(3).backward();
    }));
  }
  return all;
}

TEST(FailedBackward, WhatFollowsIsAsInTheUnshardedModel) {
  for (const auto& strategy : tests_the_cpu() ? strategies() : sweep(strategies(), 4, is_default)) {
    for (const bool layers_apart : {false, true}) {
      for (const auto& scenario : scenarios()) {
        SCOPED_TRACE(strategy.name + (layers_apart ? ", layers apart: " : ": ") + scenario.name);
        Models plain(nullptr, false), sharded(&strategy, layers_apart);
        scenario.run(plain);
        scenario.run(sharded);
        const auto expected = plain.gradients(), actual = sharded.gradients();
        for (size_t i = 0; i < expected.size(); ++i) {
          ASSERT_EQ(actual[i].defined(), expected[i].defined()) << "gradient " << i;
          if (expected[i].defined()) EXPECT_TENSORS_CLOSE(actual[i], expected[i], 1e-12, 1e-14);
        }
      }
    }
  }
}

/// Of the model, which is sharded as a part of `outer`, or not yet.
Tensor outer_loss(Models& models, torch::nn::Linear& outer, int64_t batch) {
  return outer(models.model->forward(models.input(batch))).square().mean();
}

TEST(FailedBackward, OfAModelThatIsThenShardedAsAPartIsForgotten) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Models plain(nullptr, false), sharded(&strategy, /*layers_apart=*/false);
    torch::manual_seed(6);
    torch::nn::Linear plain_outer(3, 2);
    plain_outer->to(torch::kDouble);
    torch::manual_seed(6);
    torch::nn::Linear outer(3, 2);
    outer->to(torch::kDouble);
    fail(bad_loss(sharded, 0)); // the last layer's gradients have landed
    sharded.zero_grad();
    torch::nn::ModuleList whole;
    whole->push_back(sharded.model.ptr());
    whole->push_back(outer);
    strategy.replicates ? replicate(*whole, strategy.mesh(), strategy.options)
                        : fully_shard(*whole, strategy.mesh(), strategy.options);
    outer_loss(plain, plain_outer, 1).backward();
    outer_loss(sharded, outer, 1).backward();
    const auto expected = plain.model->parameters(), actual = sharded.model->parameters();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TENSORS_CLOSE(full(actual[i].grad()), expected[i].grad(), 1e-12, 1e-14);
    EXPECT_TENSORS_CLOSE(full(outer->weight.grad()), plain_outer->weight.grad(), 1e-12, 1e-14);
  }
}

/// Throws when one of the first layer's gradients has landed, which ends the reduction of the last layer's, and another has not.
Tensor half_landed_loss(Models& models) {
  const auto transposed = models.first().weight.t();
  throw_in(transposed);
  const auto hidden = torch::addmm(models.first().bias, models.input(0), transposed).tanh();
  return models.last().forward(hidden).square().mean();
}

/// What it reduced before it threw waits for the next event of the model, which does not come.
TEST(FailedBackward, KeepsNoModelAlive) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    auto models = std::make_unique<Models>(&strategy, /*layers_apart=*/true);
    fsdp(*models->model).set_reduce_scatter_max_input_buffers(1);
    fail(half_landed_loss(*models));
    std::vector<std::weak_ptr<internal::ParameterGroup>> groups;
    for (const auto& parameter : models->model->parameters())
      groups.push_back(internal::parameter_meta(parameter)->group->weak_from_this());
    models.reset();
    for (const auto& group : groups) {
      // A thread of the device's may hold the failed graph for a moment yet.
      for (int tries = 0; tries < 1000 && !group.expired(); ++tries) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      EXPECT_TRUE(group.expired());
    }
  }
}

} // namespace
} // namespace tessera::testing::failed_backward_test
