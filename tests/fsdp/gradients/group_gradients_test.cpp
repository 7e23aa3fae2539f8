// Gradient accumulation across backwards that differ: parameters frozen in between, blocks left out, hooks that keep gradients.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <tessera/base/current_stream.h>
#include <tessera/collectives/continued_work.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/reduction_extension.h>

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/tests/fsdp/twin.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::group_gradients_test {
namespace {

void for_each_strategy(const std::function<void(Twin&, FSDPModule&)>& test) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Twin models(strategy);
    auto root = fsdp(*models.sharded);
    test(models, root);
  }
}

/// The loss without the blocks, whose groups get no gradient.
torch::Tensor loss_without_blocks(Net& net, const torch::Tensor& tokens) {
  return net->norm(net->embedded(tokens)).square().mean();
}

using Delay = std::pair<std::string, std::function<void(FSDPModule&, bool)>>;

/// The ways to leave reductions unfinished until a backward that is the last.
std::vector<Delay> delays() {
  return {{", in flight", [](FSDPModule& root, bool last) { root.set_is_last_backward(last); }},
          {", before the all-reduce", [](FSDPModule& root, bool last) { root.set_requires_all_reduce(last); }}};
}

TEST(GroupGradients, FreezingAmidAReductionKeepsItsGradient) {
  for (const auto& strategy : strategies()) {
    for (const auto& [name, set_last] : delays()) {
      SCOPED_TRACE(strategy.name + name);
      Twin models(strategy);
      auto root = fsdp(*models.sharded);
      set_last(root, false);
      models.backward(0);
      models.set_requires_grad("blocks.1.up.weight", false);
      set_last(root, true);
      models.backward(1);
      models.expect_equal_gradients();
    }
  }
}

TEST(GroupGradients, UnfreezingAmidAnAccumulationIsAnErrorOrRight) {
  for (const auto& strategy : strategies()) {
    for (const auto& [name, set_last] : delays()) {
      SCOPED_TRACE(strategy.name + name);
      Twin models(strategy);
      models.set_requires_grad("blocks.1.norm.weight", false);
      auto root = fsdp(*models.sharded);
      set_last(root, false);
      models.backward(0);
      models.set_requires_grad("blocks.1.norm.weight", true);
      models.set_requires_grad("blocks.1.norm.bias", false); // of the same size
      set_last(root, true);
      const auto message = error_of([&] { models.backward(1); });
      if (message == "no error") {
        models.expect_equal_gradients();
      } else {
        EXPECT_NE(message.find("blocks.1.norm.weight began to require a gradient while"), std::string::npos) << message;
      }
      models.sharded->zero_grad();
      models.plain->zero_grad();
      models.backward(2);
      models.expect_equal_gradients();
    }
  }
}

TEST(GroupGradients, AGroupThatTheLastBackwardLeavesOutIsReducedNevertheless) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    root.set_requires_all_reduce(false);
    models.backward(0);
    models.backward(1, loss_without_blocks);
    root.set_requires_all_reduce(true);
    models.backward(2, loss_without_blocks);
    models.expect_equal_gradients();
    models.backward(3);
    models.expect_equal_gradients();
  });
}

TEST(GroupGradients, OneReduceBufferGivesTheSame) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    root.set_reduce_scatter_max_input_buffers(1);
    models.backward(0);
    root.set_is_last_backward(false);
    models.backward(1);
    root.set_is_last_backward(true);
    models.backward(2);
    models.expect_equal_gradients();
    EXPECT_THROWS_WITH(root.set_reduce_scatter_max_input_buffers(3), "there are 1 or 2 buffers, but 3 were asked for on rank");
  });
}

/// The loss of the first block, after a forward of the second as well, whose gradients never come.
torch::Tensor loss_of_a_part(Net& net, const torch::Tensor& tokens) {
  const auto x = net->embedded(tokens);
  const auto first = (*net->blocks)[0]->as<Block>()->forward(x);
  (*net->blocks)[1]->as<Block>()->forward(first);
  return first.square().mean();
}

torch::Tensor loss_of_the_last_block(Net& net, const torch::Tensor& tokens) {
  const auto x = torch::sin(torch::arange(net->norm->weight.size(0)) + tokens.slice(1, 0, 1));
  return (*net->blocks)[2]->as<Block>()->forward(x.to(net->norm->weight.device())).square().mean();
}

TEST(GroupGradients, ALossWithZeroTimesWhatItLeavesOutIsReducedBesideThoseOfOtherRanks) {
  for_each_strategy([](Twin& models, FSDPModule&) {
    const auto loss = [](Net& net, int64_t rank) {
      const auto tokens = part_of(global_batch(0), rank, world_size());
      const auto whole = loss_of(net, tokens);
      return rank % 2 == 0 ? whole : loss_without_blocks(net, tokens) + 0 * whole;
    };
    for (int64_t rank = 0; rank < world_size(); ++rank) (loss(models.plain, rank) / world_size()).backward();
    loss(models.sharded, world_rank()).backward();
    models.expect_equal_gradients();
  });
}

TEST(GroupGradients, AGroupReducedAtTheEndOfABackwardGetsItsAllReduceLater) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    root.set_requires_all_reduce(false);
    models.backward(0, loss_of_a_part);
    root.set_requires_all_reduce(true);
    models.backward(1, loss_of_the_last_block);
    models.expect_equal_gradients();
  });
}

TEST(GroupGradients, TogglesWhileAReductionIsInFlightLoseNothing) {
  for (const auto& strategy : strategies()) {
    for (const bool last_at_once : {true, false}) {
      SCOPED_TRACE(strategy.name);
      Twin models(strategy);
      auto root = fsdp(*models.sharded);
      root.set_is_last_backward(false);
      models.backward(0, loss_of_a_part);
      root.set_requires_all_reduce(false);
      root.set_is_last_backward(last_at_once);
      models.backward(1, loss_of_the_last_block);
      models.backward(2, loss_of_a_part);
      root.set_requires_all_reduce(true);
      root.set_is_last_backward(true);
      models.backward(3, loss_of_the_last_block);
      models.expect_equal_gradients();
    }
  }
}

TEST(GroupGradients, AFailedBackwardDropsWhatWaitedForAnAllReduce) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    root.set_requires_all_reduce(false);
    models.backward(0, loss_of_a_part);
    models.backward(1, loss_of_the_last_block);
    auto loss = loss_of_the_last_block(models.sharded, global_batch(2));
    loss.register_hook([](const torch::Tensor&) { throw std::runtime_error("thrown in backward"); });
    EXPECT_THROWS_WITH((loss * models.sharded->norm->weight.sum()).backward(), "thrown in backward");
    root.set_requires_all_reduce(true);
    models.sharded->zero_grad();
    models.plain->zero_grad();
    models.backward(3, loss_of_a_part);
    models.expect_equal_gradients();
  });
}

TEST(GroupGradients, WhatIsComputedFromAnEmptyGradientCanReplaceIt) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    torch::nn::Module module;
    const auto empty = module.register_parameter("empty", torch::zeros({0, 4}));
    const auto weight = module.register_parameter("weight", torch::ones({3}));
    const auto loss = [&] { return empty.sum() + weight.sum(); };
    strategy.replicates ? replicate(module, strategy.mesh()) : fully_shard(module, strategy.mesh(), strategy.options);
    loss().backward();
    empty.mutable_grad() = empty.grad().clone() * 0.5;
    EXPECT_EQ(DTensor(empty.grad()).placements(), DTensor(empty).placements());
    EXPECT_EQ(error_of([&] { loss().backward(); }), "no error");
  }
}

TEST(GroupGradients, WhatAHookKeepsStaysAsItIs) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Twin models(strategy);
    auto weight = models.sharded->named_parameters()["blocks.1.up.weight"];
    torch::Tensor kept, value;
    weight.register_hook([&](const torch::Tensor& gradient) {
      if (kept.defined()) return;
      kept = gradient;
      value = full(gradient).clone();
    });
    models.backward(0);
    models.backward(1);
    torch::nn::utils::clip_grad_norm_(models.sharded->parameters(), 1e-3);
    EXPECT_TRUE(torch::equal(full(kept), value));
  }
}

TEST(GroupGradients, ABackwardInAHookIsAPartOfTheOneAroundIt) {
  for (const char* name : {"embed.weight", "norm.weight"}) {
    SCOPED_TRACE(name);
    for_each_strategy([&](Twin& models, FSDPModule&) {
      const auto further = global_batch(1);
      int calls = 0;
      const auto train_in_hook = [&](Net& net, const torch::Tensor& tokens) {
        net->named_parameters()[name].register_hook([&net, &calls, tokens](const torch::Tensor&) {
          if (++calls % 2 == 0) return; // in the backward that it makes
          const at::AutoGradMode grad_mode(true);
          loss_of(net, tokens).backward();
        });
      };
      train_in_hook(models.plain, further);
      train_in_hook(models.sharded, part_of(further, world_rank(), world_size()));
      models.backward(0);
      EXPECT_EQ(calls, 4);
      models.expect_equal_gradients();
      models.backward(2);
      models.expect_equal_gradients();
    });
  }
}

TEST(GroupGradients, AHookThatFreezesItsParameterLeavesNoGradient) {
  for_each_strategy([](Twin& models, FSDPModule&) {
    for (auto* net : {&models.plain, &models.sharded}) {
      auto parameter = (*net)->named_parameters()["blocks.1.up.weight"];
      parameter.register_hook([weak = c10::weak_intrusive_ptr(parameter.getIntrusivePtr())](const torch::Tensor&) {
        torch::Tensor(weak.lock()).requires_grad_(false);
      });
    }
    models.backward(0);
    EXPECT_FALSE(models.gradient("blocks.1.up.weight").defined());
    models.expect_equal_gradients();
  });
}

TEST(GroupGradients, HooksHoldNoLock) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    int calls = 0;
    models.sharded->named_parameters()["blocks.1.up.weight"].register_hook([&](const torch::Tensor&) {
      std::thread([&] { root.reshard(); }).join();
      ++calls;
    });
    models.backward(0);
    EXPECT_EQ(calls, 1);
    models.expect_equal_gradients();
  });
}

/// The sum of a parameter of the root's group, which a forward computes.
torch::Tensor weighted_norm(const Twin& models) {
  const auto& weight = models.sharded->norm->weight;
  return (weight * torch::ones(weight.sizes(), test_device())).sum();
}

/// Hooks of reductions run amid the work of the model, and may read it all the same.
TEST(GroupGradients, AHookOfTheReductionMayReadTheModel) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    std::vector<double> sums;
    root.set_all_reduce_hook([&](const torch::Tensor&) {
      const torch::NoGradGuard no_grad;
      sums.push_back(weighted_norm(models).item<double>());
      root.set_unshard_in_backward(true); // as it is: what a program sets takes the lock
    });
    const auto expected = models.plain->norm->weight.sum().item<double>();
    models.backward(0);
    ASSERT_FALSE(sums.empty());
    for (const double sum : sums) EXPECT_NEAR(sum, expected, 1e-5);
    models.expect_equal_gradients();
  });
}

/// A backward of the model there is an error, which ends the backward around it; the next one is as if there had been none.
TEST(GroupGradients, AHookOfTheReductionMustNotRunABackwardOfTheModel) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    root.set_all_reduce_hook([&](const torch::Tensor&) {
      const torch::AutoGradMode grad(true);
      weighted_norm(models).backward();
    });
    EXPECT_THROWS_WITH(loss_of(models.sharded, own_batch(0)).backward(),
                       "a backward in a hook of set_all_reduce_hook has brought a gradient of norm.weight on rank " +
                           std::to_string(world_rank()));
    root.set_all_reduce_hook({});
    models.sharded->zero_grad();
    models.backward(0);
    models.expect_equal_gradients();
  });
}

TEST(GroupGradients, AHookOfTheReductionMayCatchTheErrorOfItsBackward) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    int calls = 0;
    root.set_all_reduce_hook([&](const torch::Tensor&) {
      const torch::AutoGradMode grad(true);
      EXPECT_THROWS_WITH(weighted_norm(models).backward(),
                         "a backward in a hook of set_all_reduce_hook has brought a gradient of ");
      ++calls;
    });
    for (int64_t step = 0; step < 2; ++step) {
      models.backward(step);
      models.expect_equal_gradients();
    }
    EXPECT_GT(calls, 0);
  });
}

/// Reduces plainly, and then calls a function.
struct Followed final : ReductionPolicy, ReductionExtension {
  explicit Followed(std::function<void()> rest) : follow(std::move(rest)) {}
  std::string description() const override { return "followed"; }
  std::shared_ptr<ReductionExtension> make(const std::shared_ptr<const GradientLayout>& /*layout*/,
                                           const std::vector<ReductionStage>& /*stages*/) const override {
    return std::make_shared<Followed>(follow);
  }
  Work reduce(const Reduction& reduction) override {
    auto& ranks = *reduction.stage.communicator;
    const bool scatters = reduction.stage.kind == ReductionStage::Kind::kReduceScatter;
    return then(scatters ? ranks.reduce_scatter(reduction.output, reduction.input, reduction.op, reduction.label)
                         : ranks.all_reduce(reduction.output, reduction.op, reduction.label),
                follow);
  }
  int64_t payload(const ReductionStage& /*stage*/) const override { return 0; }
  std::function<void()> follow;
};

/// What follows the collective of an extension runs where it is waited for, amid the work of the model as well.
TEST(GroupGradients, WhatFollowsAnExtendedReductionMayReadTheModel) {
  for (auto strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    std::function<void()> follow = [] {};
    strategy.options.communication.reduction = std::make_shared<Followed>([&] { follow(); });
    Twin models(strategy);
    auto root = fsdp(*models.sharded);
    std::vector<double> sums;
    follow = [&] {
      const torch::NoGradGuard no_grad;
      sums.push_back(weighted_norm(models).item<double>());
      root.set_unshard_in_backward(true); // as it is: what a program sets takes the lock
    };
    const auto expected = models.plain->norm->weight.sum().item<double>();
    models.backward(0);
    EXPECT_EQ(sums.empty(), world_size() == 1);
    for (const double sum : sums) EXPECT_NEAR(sum, expected, 1e-5);
    models.expect_equal_gradients();
  }
}

TEST(GroupGradients, WhatAHookReturnsTwiceIsAddedTwice) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Twin models(strategy);
    auto weight = models.sharded->named_parameters()["blocks.1.up.weight"];
    auto ones = torch::ones_like(weight).detach();
    weight.register_hook([&](const torch::Tensor&) { return ones; });
    for (int64_t step = 0; step < 3; ++step) models.backward(step);
    EXPECT_TRUE(torch::equal(full(ones), torch::ones_like(full(ones))));
    EXPECT_TRUE(torch::equal(full(models.gradient("blocks.1.up.weight")), 3 * full(ones)));
  }
}

TEST(GroupGradients, SwitchingSyncBackOnAlsoSwitchesTheAllReduceOn) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    root.set_requires_all_reduce(false);
    models.backward(0);
    root.set_requires_gradient_sync(false);
    models.backward(1);
    root.set_requires_gradient_sync(true);
    models.backward(2);
    models.expect_equal_gradients();
  });
}

TEST(GroupGradients, ADivideFactorThatIsNoPositiveNumberIsAnError) {
  Twin models(strategies()[0]);
  auto root = fsdp(*models.sharded);
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double factor : {infinity, -infinity, std::nan(""), 0.0, -0.0, -2.0}) {
    EXPECT_THROWS_WITH(root.set_gradient_divide_factor(factor), "must be positive and finite, but is ");
    EXPECT_THROWS_WITH(root.set_gradient_divide_factor(factor), "on rank " + std::to_string(world_rank()));
  }
  models.backward(0);
  models.expect_equal_gradients();
}

TEST(GroupGradients, AnotherDivideFactorAmidAnAccumulationIsAnError) {
  if (world_size() == 1) return;
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Twin models(strategy);
    auto root = fsdp(*models.sharded);
    root.set_is_last_backward(false);
    models.backward(0);
    // Gradients that are whole are not reduced yet: any factor is in time.
    const bool in_flight = !strategy.replicates && strategy.options.strategy != tessera::Strategy::kZero1;
    if (in_flight) {
      EXPECT_THROWS_WITH(root.set_gradient_divide_factor(3), "are still being reduced, with another factor");
    } else {
      for (auto& block : *models.sharded->blocks) fsdp(*block).set_gradient_divide_factor(static_cast<double>(world_size()));
      EXPECT_NO_THROW(root.set_gradient_divide_factor(static_cast<double>(world_size())));
    }
    root.set_is_last_backward(true);
    models.backward(1);
    models.expect_equal_gradients();
    EXPECT_NO_THROW(root.set_gradient_divide_factor(3));
    root.set_requires_all_reduce(false);
    models.backward(2);
    EXPECT_NO_THROW(root.set_gradient_divide_factor(4));
  }
}

/// A layer of ones whose gradients are reduced in fp16.
struct ReducedInHalf {
  explicit ReducedInHalf(Strategy strategy) {
    torch::nn::init::ones_(linear->weight);
    auto& options = strategy.options;
    options.mixed_precision.reduce_dtype = torch::kHalf;
    strategy.replicates ? replicate(*linear, strategy.mesh(), options) : fully_shard(*linear, strategy.mesh(), options);
  }
  /// The whole gradient where that of each rank has `value` everywhere.
  torch::Tensor reduced(double value) {
    linear->forward(torch::full({1, 4}, value, test_device())).sum().backward();
    return full(linear->weight.grad());
  }

  torch::nn::Linear linear{torch::nn::LinearOptions(4, 3).bias(false)};
};

// The ranks' sum has no number of fp16, and their mean has. Each is divided by about the root of the factor before.
TEST(GroupGradients, ADivideFactorKeepsSumsInRangeOfFloat16) {
  const double gradient = world_size() == 4 ? 30000 : 40000;
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    ReducedInHalf model(strategy);
    fsdp(*model.linear).set_gradient_divide_factor(static_cast<double>(world_size()));
    EXPECT_TENSORS_CLOSE(model.reduced(gradient), torch::full({3, 4}, gradient), 1e-3);
  }
}

/// Each divided by the number of ranks has no number of fp16, and their mean has. NCCL's own mean divides first.
TEST(GroupGradients, SmallGradientsOfFloat16AreNotDividedToZero) {
  const double smallest = std::exp2(-24), gradient = world_size() == 4 ? 2 * smallest : world_size() * smallest;
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    EXPECT_TENSORS_EQUAL(ReducedInHalf(strategy).reduced(gradient), torch::full({3, 4}, gradient));
  }
}

TEST(GroupGradients, AHookOfAReductionInFloat16SeesAMean) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    ReducedInHalf model(strategy);
    fsdp(*model.linear).set_all_reduce_hook([](const torch::Tensor& flat) { flat.clamp_(-8, 8); });
    EXPECT_TENSORS_EQUAL(model.reduced(8), torch::full({3, 4}, 8.0));
  }
}

// In fp16 a part of the factor is divided away before the all-reduce, and the rest after it.
TEST(GroupGradients, AFactorThatWouldDivideAPutOffAllReduceOtherwiseIsAnError) {
  if (world_size() != 4) GTEST_SKIP() << "2 x 2 ranks";
  torch::nn::Linear linear(torch::nn::LinearOptions(4, 3).bias(false));
  torch::nn::init::ones_(linear->weight);
  FullyShardOptions options;
  options.mixed_precision.reduce_dtype = torch::kHalf;
  auto handle = fully_shard(linear, init_device_mesh(mesh_device_type, {2, 2}), options);
  handle.set_gradient_divide_factor(4);
  handle.set_requires_all_reduce(false);
  linear->forward(torch::ones({1, 4}, test_device())).sum().backward();
  EXPECT_THROWS_WITH(handle.set_gradient_divide_factor(64), "are still being reduced, with another factor");
  EXPECT_NO_THROW(handle.set_gradient_divide_factor(3)); // by 2 before, as 4
  handle.set_requires_all_reduce(true);
  linear->forward(torch::ones({1, 4}, test_device())).sum().backward();
  EXPECT_TENSORS_CLOSE(full(linear->weight.grad()), torch::full({3, 4}, 8.0 / 3), 1e-3);
}

TEST(GroupGradients, AHookOfTheReductionMayChangeIt) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    std::vector<int64_t> calls;
    root.set_all_reduce_hook([&](const torch::Tensor& flat) {
      calls.push_back(flat.dim());
      flat.mul_(2);
    });
    models.backward(0);
    EXPECT_FALSE(calls.empty());
    models.plain->embed->weight.mutable_grad() *= 2;
    models.plain->norm->weight.mutable_grad() *= 2;
    models.plain->norm->bias.mutable_grad() *= 2;
    models.expect_equal_gradients();
    root.set_requires_gradient_sync(false);
    models.backward(1);
    EXPECT_THROWS_WITH(root.set_all_reduce_hook({}), "wait for their reduction");
  });
}

TEST(GroupGradients, AHookMayHaveAStreamOfItsOwn) {
  const c10::Device elsewhere(c10::kCUDA, 3);
  for_each_strategy([&](Twin& models, FSDPModule& root) {
    EXPECT_THROWS_WITH(root.set_all_reduce_hook({}, c10::Stream(c10::Stream::DEFAULT, elsewhere)),
                       "the stream is of cuda:3, but ");
    if (tests_the_cpu()) return;
    const auto device = root.mesh().device();
    const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/false);
    int64_t calls = 0;
    const auto doubles = [&](const torch::Tensor& flat) {
      EXPECT_EQ(internal::current_stream(device), stream);
      flat.mul_(2);
      ++calls;
    };
    for (const auto& state : root.state()->subtree()) FSDPModule(state).set_all_reduce_hook(doubles, stream);
    models.backward(0);
    EXPECT_GT(calls, 0);
    root.set_requires_all_reduce(false);
    models.backward(1);
    root.set_requires_all_reduce(true);
    models.backward(2);
    const auto expected = models.plain->named_parameters();
    for (const auto& item : models.sharded->named_parameters())
      EXPECT_TENSORS_CLOSE(full(item.value().grad()), expected[item.key()].grad() * 2, 1e-4, 1e-5) << item.key();
    for (const auto& state : root.state()->subtree())
      FSDPModule(state).set_all_reduce_hook([](const torch::Tensor&) { throw std::runtime_error("the hook fails"); }, stream);
    EXPECT_THROWS_WITH(loss_of(models.sharded, global_batch(0)).backward(), "the hook fails");
  });
}

/// The second backward has memory of the first.
TEST(GroupGradients, AHookOfTheReductionSeesTheGradientsAlone) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    double seen = 0;
    root.set_all_reduce_hook([&](const torch::Tensor& flat) { seen += flat.square().sum().item<double>(); });
    for (int64_t step = 0; step < 2; ++step) {
      models.sharded->zero_grad();
      seen = 0;
      loss_of(models.sharded, global_batch(step)).backward();
      double expected = 0;
      for (const auto& group : root.state()->groups()) {
        for (const auto& each : group->parameters())
          expected += DTensor(at::Tensor(each.tensor.lock()).grad()).local().square().sum().item<double>();
      }
      EXPECT_NEAR(seen, expected, 1e-5 * (1 + expected));
    }
  });
}

TEST(GroupGradients, AHookOfTheReductionThatThrowsEndsTheBackward) {
  for_each_strategy([](Twin& models, FSDPModule& root) {
    root.set_all_reduce_hook([](const torch::Tensor&) { throw std::runtime_error("the hook fails"); });
    EXPECT_THROWS_WITH(loss_of(models.sharded, global_batch(0)).backward(), "the hook fails");
    root.set_all_reduce_hook({});
    models.sharded->zero_grad();
    models.backward(1);
    models.expect_equal_gradients();
  });
}

/// As `gradient_as_bucket_view` of DDP: no second copy of the gradients.
TEST(GroupGradients, GradientsOfAGroupAreViewsOfOneBuffer) {
  if (world_size() == 1) GTEST_SKIP() << "one rank reduces nothing: gradients are autograd's own tensors";
  for (const auto& strategy : strategies()) {
    if (strategy.name == "no-shard in buckets") continue; // a block lies in several
    SCOPED_TRACE(strategy.name);
    Twin models(strategy);
    models.backward(0);
    for (const auto& block : *models.sharded->blocks) {
      std::vector<torch::Tensor> parts;
      for (const auto& parameter : block->parameters()) {
        const auto local = DTensor(parameter.grad()).local();
        if (local.numel() > 0) parts.push_back(local);
      }
      for (const auto& part : parts) EXPECT_TRUE(part.storage().is_alias_of(parts.front().storage()));
    }
    models.expect_equal_gradients();
  }
}

} // namespace
} // namespace tessera::testing::group_gradients_test
