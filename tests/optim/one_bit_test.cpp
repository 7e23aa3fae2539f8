// Models that are trained by optimizers which reduce in one bit an element.
#include <gmock/gmock.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/fsdp_module.h>
#include <tessera/fsdp/step_in_backward.h>
#include <tessera/optim/one_bit.h>
#include <tessera/optim/step.h>
#include <tessera/training/grad_scaler.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <tessera/optim/parts/one_bit_reduction.h>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/optim/optimizers.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::one_bit_test {
namespace {

/// A replicated model that keeps each rank's own gradients.
Net replicated_net(const OffloadPolicy& offload = {}) {
  auto net = make_net();
  net->to(test_device());
  replicate(*net, world_mesh(), {.bucket_bytes = 3000, .offload = offload});
  fsdp(*net).set_keeps_own_gradients(true);
  return net;
}

void expect_equal_on_all_ranks(const Net& net) {
  for (const auto& item : net->named_parameters()) {
    const auto own = internal::part_of(item.value()).detach().clone().view({-1}).to(world_mesh().device());
    const auto bits = own.view(torch::kInt), least = bits.clone(), most = bits.clone();
    const auto communicator = world_mesh().communicator();
    communicator->all_reduce(least, ReduceOp::kMin, "bits").wait();
    communicator->all_reduce(most, ReduceOp::kMax, "bits").wait();
    EXPECT_TRUE(torch::equal(least, most)) << item.key();
  }
}

struct Maker {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)> make;
};

// Few steps of warm-up leave second moments near 0, so that steps by the mean size need a larger eps.
std::vector<Maker> makers() {
  return {
      {"OneBitAdam",
       [](const auto& all) { return std::make_unique<OneBitAdam>(all, OneBitAdamOptions(3e-3).eps(1e-2).freeze_step(4)); }},
      {"OneBitLamb",
       [](const auto& all) { return std::make_unique<OneBitLamb>(all, OneBitLambOptions(3e-3).eps(1e-2).freeze_step(4)); }},
      {"ZeroOneAdam", [](const auto& all) {
         return std::make_unique<ZeroOneAdam>(
             all,
             ZeroOneAdamOptions(3e-3).eps(1e-2).var_freeze_step(6).var_update_scaler(2).local_step_scaler(4).local_step_clipper(
                 2));
       }}};
}

TEST(OneBit, TrainsAModelThatStaysEqualOnAllRanks) {
  for (const auto& each : makers()) {
    SCOPED_TRACE(each.name);
    auto net = replicated_net();
    const auto optimizer = each.make(net->parameters());
    double first = 0, last = 0;
    for (int64_t step = 0; step < 20; ++step) { // the last of which is one that reduces, of ZeroOneAdam too
      optimizer->zero_grad();
      const auto loss = loss_of(net, own_batch(0));
      loss.backward();
      optimizer->step();
      last = mean_over_ranks(loss).item<double>();
      if (step == 0) first = last;
    }
    EXPECT_LT(last, first);
    expect_equal_on_all_ranks(net);
  }
}

TEST(OneBit, GoesOnAfterAResume) {
  for (const auto& each : makers()) {
    SCOPED_TRACE(each.name);
    auto net = replicated_net(), loaded = replicated_net();
    const auto optimizer = each.make(net->parameters()), resumed = each.make(loaded->parameters());
    const auto train = [](Net& model, torch::optim::Optimizer& with, int64_t begin, int64_t end) {
      for (int64_t step = begin; step < end; ++step) {
        with.zero_grad();
        loss_of(model, own_batch(step)).backward();
        with.step();
      }
    };
    train(net, *optimizer, 0, 8);
    const auto saved = state_dict(*net, *optimizer, {.full_state_dict = true});
    auto target = state_dict(*loaded, *resumed);
    load_state_dict(target, saved);
    train(net, *optimizer, 8, 12);
    train(loaded, *resumed, 8, 12);
    const auto others = net->named_parameters();
    for (const auto& item : loaded->named_parameters())
      EXPECT_TRUE(torch::equal(full(item.value()), full(others[item.key()]))) << item.key();
  }
}

/// A step that a scaler skips changes neither moments nor errors, and counts as none.
TEST(OneBit, AScalersInfinityChangesNothing) {
  for (const auto& each : makers()) {
    SCOPED_TRACE(each.name);
    auto net = replicated_net(), scaled = replicated_net();
    const auto optimizer = each.make(net->parameters()), other = each.make(scaled->parameters());
    GradScaler scaler({.init_scale = 8});
    for (int64_t step = 0; step < 12; ++step) {
      const bool overflows = step == 3 || step == 8;
      other->zero_grad();
      scaler.scale(loss_of(scaled, own_batch(step))).backward();
      if (overflows && world_rank() == last_rank()) {
        const torch::NoGradGuard no_grad;
        internal::part_of(scaled->parameters()[0].grad()).fill_(std::numeric_limits<float>::infinity());
      }
      EXPECT_EQ(scaler.step(*other), !overflows);
      scaler.update(8);
      if (overflows) continue;
      optimizer->zero_grad();
      loss_of(net, own_batch(step)).backward();
      optimizer->step();
    }
    const auto others = net->named_parameters();
    for (const auto& item : scaled->named_parameters())
      EXPECT_TRUE(torch::equal(internal::part_of(item.value()), internal::part_of(others[item.key()]))) << item.key();
  }
}

/// What each rank has lies on the host, or in files that are stepped bucket by bucket. A step that a scaler skips lies between.
TEST(OneBit, StepsWhatLiesOnTheHostAndInFiles) {
  for (const auto& each : makers()) {
    for (const bool in_files : {false, true}) {
      SCOPED_TRACE(each.name + (in_files ? " in files" : " on the host"));
      const TemporaryFolder folder;
      const auto policy = in_files ? offload_to_files(folder.path().string(), false) : offload_to_host(false);
      auto net = replicated_net(), offloaded = replicated_net(policy), loaded = replicated_net(policy);
      const auto optimizer = each.make(net->parameters()), other = each.make(offloaded->parameters()),
                 resumed = each.make(loaded->parameters());
      GradScaler scaler({.init_scale = 8}), resumed_scaler({.init_scale = 8});
      const auto train = [&](Net& model, torch::optim::Optimizer& with, GradScaler& by, int64_t step, bool overflows) {
        with.zero_grad();
        by.scale(loss_of(model, own_batch(step))).backward();
        if (overflows && world_rank() == last_rank()) {
          const torch::NoGradGuard no_grad;
          internal::part_of(model->parameters()[0].grad()).fill_(std::numeric_limits<float>::infinity());
        }
        EXPECT_EQ(by.step(with), !overflows);
        by.update(8);
      };
      GradScaler plain({.init_scale = 8});
      for (int64_t step = 0; step < 12; ++step) train(net, *optimizer, plain, step, step == 3 || step == 9);
      for (int64_t step = 0; step < 8; ++step) train(offloaded, *other, scaler, step, step == 3);
      const auto saved = state_dict(*offloaded, *other, {.full_state_dict = true});
      auto target = state_dict(*loaded, *resumed);
      load_state_dict(target, saved);
      for (int64_t step = 8; step < 12; ++step) train(loaded, *resumed, resumed_scaler, step, step == 9);
      EXPECT_EQ(parameter_difference(*loaded, *net), 0);
      expect_equal_on_all_ranks(loaded);
    }
  }
}

/// Every rank steps the same buckets, whichever it has gradients of.
TEST(OneBit, StepsInFilesWhatSomeRanksDoNotUse) {
  for (const auto& each : makers()) {
    SCOPED_TRACE(each.name);
    const TemporaryFolder folder;
    auto net = replicated_net(), in_files = replicated_net(offload_to_files(folder.path().string(), false));
    const auto optimizer = each.make(net->parameters()), other = each.make(in_files->parameters());
    for (int64_t step = 0; step < 10; ++step) {
      for (const auto& [model, with] : {std::pair(net, optimizer.get()), std::pair(in_files, other.get())}) {
        with->zero_grad();
        auto trained = model;
        if (world_rank() == step % world_size()) {
          loss_of(trained, own_batch(step)).backward();
        } else {
          trained->embedded(own_batch(step)).square().mean().backward(); // the blocks have no gradient here
        }
        tessera::step(*with);
      }
    }
    EXPECT_EQ(parameter_difference(*in_files, *net), 0);
  }
}

TEST(OneBit, SendsABitAnElementTwice) {
  if (world_size() == 1) GTEST_SKIP() << "one rank sends nothing";
  auto net = replicated_net();
  OneBitAdam optimizer(net->parameters(), OneBitAdamOptions(1e-3).freeze_step(1));
  const auto step = [&] {
    process_context().reset_counters();
    loss_of(net, own_batch(0)).backward();
    EXPECT_EQ(process_context().count(CollectiveKind::kAllReduce).calls, 0); // nothing is reduced in backward
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  int64_t elements = 0, tensors = 0, sent = 0;
  for (const auto& parameter : net->parameters()) {
    elements += parameter.numel();
    ++tensors;
    sent += 4 + internal::one_bit_part(parameter.numel(), world_size()) / 8;
  }
  const auto& context = process_context();
  EXPECT_EQ(context.count(CollectiveKind::kAllReduce).calls, 2); // which gradients there are, and all of them
  step();
  EXPECT_EQ(context.count(CollectiveKind::kAllReduce).calls, 1);
  EXPECT_EQ(context.count(CollectiveKind::kAllToAll).calls, 1);
  EXPECT_EQ(context.count(CollectiveKind::kAllGather).calls, 1);
  const auto bytes = context.count(CollectiveKind::kAllToAll).bytes;
  EXPECT_LE(bytes, sent * world_size());
  EXPECT_LE(static_cast<double>(bytes), static_cast<double>(elements) / 8 + static_cast<double>(world_size() * tensors * 5));
}

TEST(OneBit, TakesGradientsThatAreMissingOnSomeRanks) {
  auto net = replicated_net();
  OneBitAdam optimizer(net->parameters(), OneBitAdamOptions(1e-2).freeze_step(1));
  const auto unused = full(net->blocks->ptr<BlockImpl>(0)->up->bias).clone();
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    if (world_rank() == 0) {
      net->norm(net->embedded(own_batch(step))).square().sum().backward();
    } else {
      (net->embedded(own_batch(step))).square().sum().backward();
    }
    optimizer.step();
  }
  EXPECT_TRUE(torch::equal(full(net->blocks->ptr<BlockImpl>(0)->up->bias), unused)); // no rank used it
  expect_equal_on_all_ranks(net);
}

TEST(OneBit, StepsInBackward) {
  const TemporaryFolder folder;
  for (const auto& policy : {OffloadPolicy{}, offload_to_host(false), offload_to_files(folder.path().string(), false)}) {
    SCOPED_TRACE(static_cast<int>(policy.memory));
    auto net = replicated_net(policy), after = replicated_net();
    OneBitAdam in_backward(net->parameters(), OneBitAdamOptions(1e-2).freeze_step(1)),
        own(after->parameters(), OneBitAdamOptions(1e-2).freeze_step(1));
    const auto stepping = step_in_backward(*net, in_backward);
    for (int64_t step = 0; step < 3; ++step) {
      loss_of(net, own_batch(step)).backward();
      loss_of(after, own_batch(step)).backward();
      own.step();
      own.zero_grad();
    }
    EXPECT_EQ(parameter_difference(*net, *after), 0);
  }
}

TEST(OwnGradients, GiveOtherOptimizersTheMean) {
  for (const bool is_fused : {false, true}) {
    auto net = replicated_net(), reduced = make_net();
    reduced->to(test_device());
    replicate(*reduced, world_mesh(), {});
    torch::optim::AdamW own(net->parameters(), 0.01), usual(reduced->parameters(), 0.01);
    FusedAdamW fused(net->parameters(), 0.01);
    for (int64_t step = 0; step < 2; ++step) {
      for (auto* each : {&net, &reduced}) loss_of(*each, own_batch(step)).backward();
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(is_partial(DTensor(item.value().grad()).placements()[0])) << item.key();
      const auto norm = clip_grad_norm_(*net, 0.1), expected = clip_grad_norm_(*reduced, 0.1);
      EXPECT_NEAR(norm.item<double>(), expected.item<double>(), 1e-5);
      is_fused ? fused.step() : own.step();
      usual.step();
      own.zero_grad();
      usual.zero_grad();
    }
    EXPECT_LE(parameter_difference(*net, *reduced), 1e-5) << is_fused;
  }
}

TEST(OwnGradients, StayOwnWhereAHookKeepsThem) {
  auto net = replicated_net();
  at::Tensor kept;
  net->norm->weight.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
  loss_of(net, own_batch(0)).backward();
  EXPECT_TRUE(is_partial(DTensor(net->norm->weight.grad()).placements()[0]));
  EXPECT_FALSE(kept.is_same(net->norm->weight.grad()));
}

TEST(OwnGradients, AreNotAddedToReducedOnes) {
  auto net = replicated_net();
  loss_of(net, own_batch(0)).backward();
  fsdp(*net).set_keeps_own_gradients(false);
  EXPECT_THROWS_WITH(loss_of(net, own_batch(1)).backward(), "not sharded as the parameter is");
  fsdp(*net).zero_grad();
  loss_of(net, own_batch(0)).backward();
  fsdp(*net).set_keeps_own_gradients(true);
  EXPECT_THROWS_WITH(loss_of(net, own_batch(1)).backward(), "one is reduced and one is a rank's own");
}

TEST(OneBit, RefusesWhatItCannotReduce) {
  auto net = make_net();
  net->to(test_device());
  shard_model(net, strategies()[0]);
  loss_of(net, own_batch(0)).backward();
  OneBitAdam optimizer(net->parameters());
  EXPECT_THROWS_WITH(optimizer.step(), "OneBitAdam with sharded parameters: ");
  EXPECT_THROWS_WITH(optimizer.step(), "embed.weight is ");
  EXPECT_THROWS_WITH(fsdp(*net).set_keeps_own_gradients(true), "is sharded (");
  EXPECT_THROWS_WITH(OneBitAdam({torch::ones({3})}, OneBitAdamOptions(-1)), "OneBitAdam: lr is -1");
  EXPECT_THROWS_WITH(ZeroOneAdam({torch::ones({3})}, ZeroOneAdamOptions().var_update_scaler(0)), "var_update_scaler is 0");
  EXPECT_THROWS_WITH(OneBitLamb({torch::ones({3})}, OneBitLambOptions().min_coeff(2).max_coeff(1)),
                     "min_coeff is 2 and max_coeff 1");
  const auto mesh = world_mesh();
  const auto parameter = from_local(torch::ones({3}).to(mesh.device()), mesh, {Replicate{}});
  EXPECT_THROWS_WITH(internal::by_rank_zeros(parameter, {world_size() + 1, 3}, torch::kFloat, "state dict: worker_error"),
                     "fits no other number of ranks");
}

TEST(ZeroOneAdam, IsNotSavedBetweenReductions) {
  auto net = replicated_net();
  ZeroOneAdam optimizer(net->parameters(),
                        ZeroOneAdamOptions(1e-3).var_freeze_step(1).local_step_scaler(1).local_step_clipper(4));
  for (int64_t step = 0; step < 5; ++step) {
    loss_of(net, own_batch(step)).backward();
    optimizer.step();
    optimizer.zero_grad();
    if (optimizer.is_synchronized()) {
      EXPECT_NO_THROW(state_dict(*net, optimizer));
    } else {
      EXPECT_THROWS_WITH(state_dict(*net, optimizer), "the ranks step apart");
    }
  }
  EXPECT_FALSE(optimizer.is_synchronized());
}

/// Also where parameters come together at other steps, because one had no gradient on any rank in some.
void expect_goes_on_where_it_synchronizes(const OffloadPolicy& policy) {
  auto net = replicated_net(policy), loaded = replicated_net(policy);
  const auto options = ZeroOneAdamOptions(1e-3).var_freeze_step(1).local_step_scaler(1).local_step_clipper(4);
  ZeroOneAdam optimizer(net->parameters(), options), resumed(loaded->parameters(), options);
  const auto train = [](Net& model, ZeroOneAdam& with, int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) {
      const auto x = model->embedded(own_batch(step));
      if (step % 3 == 1) {
        x.square().mean().backward(); // the blocks have no gradient
      } else {
        loss_of(model, own_batch(step)).backward();
      }
      tessera::step(with);
      with.zero_grad();
    }
  };
  train(net, optimizer, 0, 9);
  ASSERT_FALSE(optimizer.is_synchronized());
  optimizer.synchronize();
  EXPECT_TRUE(optimizer.is_synchronized());
  expect_equal_on_all_ranks(net);
  const auto saved = state_dict(*net, optimizer, {.full_state_dict = true});
  auto target = state_dict(*loaded, resumed);
  load_state_dict(target, saved);
  train(net, optimizer, 9, 14);
  train(loaded, resumed, 9, 14);
  optimizer.synchronize();
  resumed.synchronize();
  EXPECT_EQ(parameter_difference(*loaded, *net), 0);
}

TEST(ZeroOneAdam, IsSavedWhereItSynchronizes) {
  const TemporaryFolder folder;
  for (const auto& policy : {OffloadPolicy{}, offload_to_host(false), offload_to_files(folder.path().string(), false)}) {
    SCOPED_TRACE(static_cast<int>(policy.memory));
    expect_goes_on_where_it_synchronizes(policy);
  }
}

} // namespace
} // namespace tessera::testing::one_bit_test
