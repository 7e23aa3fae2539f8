// Programs that compute on several streams of their own, in one order, on the simulated device.
#include <gmock/gmock.h>

#include <utility>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/factories.h>
#include <tessera/fsdp/reshard_parameters.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/tests/fsdp/streams.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::program_streams_test {
namespace {

/// The forward's stream has the parts that neighbours gather from afterwards.
TEST_F(Streams, AModelMayEndWhileItIsGatheredOnAnotherStreamThanItsForward) {
  const auto evaluation = sim::new_stream("evaluation");
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    for (int round = 0; round < 2; ++round) {
      Net net = make_net();
      shard_model(net, strategy);
      const auto tokens = batch_of(0, sim::kDevice);
      const auto bytes = unsharded_bytes(*net->blocks[0]);
      InOneOrder program;
      const auto here = sim::stream();
      program.on(evaluation, [&] {
        loss_of(net, tokens);
        for (auto* open : {static_cast<torch::nn::Module*>(net->blocks[2].get()), static_cast<torch::nn::Module*>(net.get())})
          fsdp(*open).reshard(); // or their ends would have this stream wait
      });
      program.on(here, [&] { const auto handle = fsdp(*net->blocks[0]).unshard_async(); });
      net = nullptr;
      const c10::StreamGuard guard(evaluation);
      for (const int64_t parts : {1, 2}) write_memory_of(bytes / parts);
    }
    expect_no_races();
  }
}

/// Without the end of the model.
TEST_F(Streams, PartsOfNeighboursMayBeFreedWhileTheyAreGatheredOnAnotherStreamThanTheirs) {
  const auto training = sim::new_stream("training");
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    const auto tokens = batch_of(0, sim::kDevice);
    auto block = fsdp(*net->blocks[0]);
    const auto bytes = unsharded_bytes(*net->blocks[0]);
    InOneOrder program;
    const auto here = sim::stream();
    program.on(training, [&] { loss_of(net, tokens); });
    program.on(here, [&] {
      { const auto handle = block.unshard_async(); }
      block.reshard();
    });
    {
      const c10::StreamGuard guard(training);
      for (const int64_t parts : {1, 2}) write_memory_of(bytes / parts);
    }
    expect_no_races();
  }
}

TEST_F(Streams, AModelMayEndWhileAnotherStreamReadsIt) {
  const auto reading = sim::new_stream("reading");
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    const auto& group = *fsdp(*net->blocks[0]).state()->group();
    if (!group.needs_gather()) continue; // the parameters are the shards, of plain memory
    const auto bytes = group.layout().unsharded_bytes;
    InOneOrder program;
    const auto here = sim::stream();
    program.on(here, [&] { fsdp(*net->blocks[0]).unshard(); });
    program.on(reading, [&] { unsharded(net->blocks->at<BlockImpl>(0).up->weight).square(); });
    net = nullptr; // on a stream that does not wait for the one that reads
    write_memory_of(bytes);
    expect_no_races();
  }
}

/// The shards' stream is not the one that the gather's output belongs to.
TEST_F(Streams, AModelMayEndOnAnotherStreamThanItIsGatheredOn) {
  const auto gathering = sim::new_stream("gathering");
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    const auto& layout = fsdp(*net->blocks[0]).state()->group()->layout();
    const auto bytes = layout.shard_bytes + layout.replicated_bytes;
    InOneOrder program;
    const auto here = sim::stream();
    program.on(gathering, [&] {
      for (const auto& block : *net->blocks) fsdp(*block).unshard_async(); // each is as large
    });
    program.on(here, [&] {
      net = nullptr;
      write_memory_of(bytes);
    });
    expect_no_races();
  }
}

Net make_offloaded_net() {
  Strategy strategy = strategies().front();
  strategy.options.offload = offload_to_host();
  Net net = make_net();
  shard_model(net, strategy);
  return net;
}

/// What a forward that does not come to the first block leaves behind: the copy of its shard to the device is under way, behind
/// work that takes longer than what the program does next.
void start_fetch(Net& net) {
  const auto group = fsdp(*net->blocks[0]).state()->group();
  const auto slow = torch::ones({1500, 1500}, sim::kDevice);
  group->streams().gather.run([&] {
    slow.mm(slow);
    return Work();
  });
  group->start_fetch(internal::ModelLock(group->mutex()));
}

TEST_F(Streams, AModelMayChangeWhileAnOffloadedShardIsFetched) {
  auto net = make_offloaded_net(), twin = make_offloaded_net();
  start_fetch(net);
  std::vector<double> losses;
  for (auto* each : {&net, &twin}) {
    auto& model = *each;
    model->register_parameter("added", torch::ones(3));
    reshard_parameters(*model);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->blocks[0]->parameters()) parameter.mul_(2);
    losses.push_back(loss_of(model, batch_of(0, sim::kDevice)).item<double>());
  }
  EXPECT_EQ(losses[0], losses[1]);
  expect_no_races();
}

TEST_F(Streams, AModelMayEndWhileAnOffloadedShardIsFetched) {
  auto net = make_offloaded_net();
  const auto bytes = fsdp(*net->blocks[0]).state()->group()->layout().shard_bytes;
  start_fetch(net);
  net = nullptr;
  std::vector<torch::Tensor> given;
  for (int i = 0; i < 8; ++i) given.push_back(torch::empty({bytes}, torch::dtype(torch::kByte).pinned_memory(true)).zero_());
  expect_no_races();
}

TEST_F(Streams, AProgramMayEvaluateOnOneStreamAndTrainOnAnother) {
  Net plain = make_net();
  torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
  std::vector<double> expected;
  for (int64_t i = 0; i < 3; ++i) {
    plain_optimizer.zero_grad();
    const auto loss = loss_of(plain, batch_of(i, torch::kCPU));
    loss.backward();
    plain_optimizer.step();
    expected.push_back(loss.item<double>());
  }
  const auto evaluation = sim::new_stream("evaluation"), training = sim::new_stream("training");
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    InOneOrder program;
    std::vector<torch::Tensor> losses;
    for (int64_t i = 0; i < 3; ++i) {
      const auto tokens = batch_of(i, sim::kDevice);
      program.on(evaluation, [&] {
        const torch::NoGradGuard no_grad;
        loss_of(net, tokens);
      });
      program.on(training, [&] {
        optimizer.zero_grad();
        losses.push_back(loss_of(net, tokens));
        losses.back().backward();
        optimizer.step();
      });
      sim::synchronize(); // the next tokens
    }
    std::vector<torch::Tensor> means;
    for (const auto& loss : losses) means.push_back(mean_over_ranks(loss));
    EXPECT_THAT(values(means), ::testing::Pointwise(::testing::DoubleNear(1e-4), expected));
    expect_no_races();
  }
}

/// Autograd accumulates on the stream of fully_shard, which then does other things.
TEST_F(Streams, GradientsAreFreedOnTheStreamThatTrains) {
  const auto training = sim::new_stream("training");
  for_each_strategy([&](Net& net) {
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto tokens = batch_of(0, sim::kDevice);
    InOneOrder().on(training, [&] {
      loss_of(net, tokens).backward();
      optimizer.step();
      optimizer.zero_grad();
    });
    write_memory_of_reductions(net);
  });
}

TEST_F(Streams, ABackwardMayRunOnAnotherStreamThanItsForward) {
  const auto forward = sim::new_stream("forward"), backward = sim::new_stream("backward");
  for_each_strategy([&](Net& net) {
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto tokens = batch_of(0, sim::kDevice);
    InOneOrder program;
    torch::Tensor loss;
    program.on(forward, [&] { loss = loss_of(net, tokens); });
    program.on(backward, [&] {
      loss.backward();
      optimizer.step();
    });
  });
}

/// Gradients of a part of a group, which wait until the end of the backward for those that do not come.
TEST_F(Streams, GradientsAreKeptUnreducedOnTheStreamOfTheirForward) {
  const auto forward = sim::new_stream("forward"), backward = sim::new_stream("backward");
  for_each_strategy([&](Net& net) {
    auto& block = net->blocks->at<BlockImpl>(0);
    fsdp(*net).set_requires_gradient_sync(false);
    const auto x = torch::ones({5, block.up->options.in_features()}, sim::kDevice);
    const auto bytes = static_cast<int64_t>(block.up->weight.numel() * sizeof(float));
    InOneOrder program;
    torch::Tensor loss;
    program.on(forward, [&] {
      loss = block.up->forward(x);
      block.down->forward(loss);
    });
    program.on(backward, [&] { loss.sum().backward(); });
    {
      const c10::StreamGuard guard(forward);
      write_memory_of(bytes);
    }
  });
}

/// Each gradient comes from the stream of its forward, and is copied on another.
TEST_F(Streams, TwoForwardsOnTwoStreamsMayComeBeforeTheirBackwards) {
  Net plain = make_net();
  for (const int64_t i : {0, 1}) loss_of(plain, batch_of(i, torch::kCPU)).backward();
  const auto expected = plain->parameters();
  const auto one = sim::new_stream("one"), two = sim::new_stream("two");
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    const auto first_tokens = batch_of(0, sim::kDevice), second_tokens = batch_of(1, sim::kDevice);
    InOneOrder program;
    torch::Tensor first, second;
    program.on(one, [&] { first = loss_of(net, first_tokens); });
    program.on(two, [&] { second = loss_of(net, second_tokens); });
    program.on(two, [&] { second.backward(); });
    program.on(one, [&] { first.backward(); });
    sim::synchronize();
    const auto parameters = net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      EXPECT_LE((full(parameters[i].grad()).cpu() - expected[i].grad()).abs().max().item<double>(), 1e-4);
    expect_no_races();
  }
}

TEST_F(Streams, ATensorThatIsRedistributedIsWaitedForOnEveryStream) {
  const auto mesh = world_mesh();
  const auto x = torch::arange(60).to(torch::kFloat).reshape({6, 10});
  const auto one = sim::new_stream("one"), two = sim::new_stream("two");
  for (const auto& [from, to] : std::vector<std::pair<Placement, Placement>>{
           {Shard{0}, Shard{0}}, {Shard{0}, Replicate{}}, {Shard{0}, Shard{1}}, {Replicate{}, Shard{0}}}) {
    const auto expected = distribute_tensor(x.to(sim::kDevice), mesh, {to}).local().cpu();
    const auto source = distribute_tensor(x.to(sim::kDevice), mesh, {from});
    sim::synchronize();
    auto pending = source.redistribute_async({to});
    for (const auto& stream : {one, two}) {
      const c10::StreamGuard guard(stream);
      EXPECT_TRUE(torch::equal(pending.wait().local().clone().cpu(), expected));
    }
  }
  expect_no_races();
}

/// What one backward leaves is taken up in the next, which runs on another stream than the one that has its memory.
TEST_F(Streams, AReductionMayEndInABackwardOnAnotherStream) {
  const std::vector<std::pair<std::string, void (*)(FSDPModule, bool)>> settings{
      {"is_last_backward", [](FSDPModule module, bool on) { module.set_is_last_backward(on); }},
      {"requires_all_reduce", [](FSDPModule module, bool on) { module.set_requires_all_reduce(on); }},
      {"requires_gradient_sync", [](FSDPModule module, bool on) { module.set_requires_gradient_sync(on); }}};
  const auto other = sim::new_stream("other");
  for (const auto& [name, set] : settings) {
    for (const int64_t before : {1, 2}) { // the second adds to what the first has brought
      for (const auto& strategy : strategies()) {
        SCOPED_TRACE(c10::str(name, ", ", before, " before, ", strategy.name));
        Net net = make_net();
        shard_model(net, strategy);
        const auto tokens = batch_of(0, sim::kDevice);
        const auto here = sim::stream();
        InOneOrder program;
        const auto train = [&, set = set](bool on) {
          set(fsdp(*net), on);
          loss_of(net, tokens).backward();
        };
        program.on(here, [&] {
          for (int64_t i = 0; i < before; ++i) train(false);
        });
        program.on(other, [&] { train(true); });
        write_memory_of_reductions(net);
        program.on(here, [] {});
        expect_no_races();
      }
    }
  }
}

/// Its output belongs to the stream of the operators' backward, and is added to the gradients on that of a later forward.
TEST_F(Streams, AReductionMayEndBesideOperatorsThatRunOnItsStream) {
  const auto one = sim::new_stream("one"), two = sim::new_stream("two");
  for (const bool all_reduces : {true, false}) {
    for (const auto& strategy : strategies()) {
      SCOPED_TRACE(c10::str(strategy.name, all_reduces ? "" : ", without all-reduce"));
      Net net = make_net();
      shard_model(net, strategy);
      const auto tokens = batch_of(0, sim::kDevice);
      InOneOrder program;
      torch::Tensor loss;
      program.on(one, [&] {
        fsdp(*net).set_is_last_backward(false);
        fsdp(*net).set_requires_all_reduce(all_reduces);
        for (int i = 0; i < 2; ++i) loss_of(net, tokens).backward();
        auto x = net->embedded(tokens);
        x.register_hook([&](const torch::Tensor&) { write_memory_of_reductions(net); });
        for (auto& block : *net->blocks) x = block->as<Block>()->forward(x);
        loss = torch::matmul(net->norm(x), net->embed->weight.t()).square().mean();
      });
      program.on(two, [&] { loss_of(net, tokens); });
      program.on(one, [&] { loss.backward(); });
      sim::synchronize();
      expect_no_races();
    }
  }
}

/// Autograd keeps a gradient for the stream that it passes it on to.
TEST_F(Streams, GradientsOfDTensorsPassFromOneStreamToAnother) {
  const auto one = sim::new_stream("one"), two = sim::new_stream("two");
  torch::manual_seed(0);
  const auto whole = torch::randn({5, 3});
  const auto x = torch::Tensor(distribute_tensor(whole.to(sim::kDevice), world_mesh(), {Shard{0}})).detach().requires_grad_();
  sim::synchronize();
  for (int round = 0; round < 3; ++round) {
    x.mutable_grad() = torch::Tensor();
    torch::Tensor cube, loss;
    InOneOrder program;
    program.on(one, [&] { cube = x.pow(3); });
    program.on(two, [&] { loss = DTensor(cube.square().sum()).full_tensor(); });
    program.on(one, [&] { loss.backward(); });
    loss = cube = torch::Tensor();
    for (const auto& stream : {one, two}) {
      const c10::StreamGuard guard(stream);
      write_memory_of(DTensor(x).local().numel() * static_cast<int64_t>(sizeof(float)));
    }
    sim::synchronize();
    EXPECT_TRUE(torch::allclose(DTensor(x.grad()).full_tensor().cpu(), 6 * whole.pow(5)));
    EXPECT_THAT([&] { x.grad().storage(); }, ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr("has no storage")));
  }
  expect_no_races();
}

TEST_F(Streams, WhereAGradientOfADTensorCannotPassToAnotherStreamIsAnError) {
  const auto one = sim::new_stream("one"), two = sim::new_stream("two");
  const auto x = torch::Tensor(tessera::ones({5, 3}, world_mesh(), {Shard{0}})).requires_grad_();
  sim::synchronize();
  torch::Tensor loss, largest;
  InOneOrder program;
  program.on(one, [&] { loss = x.pow(3).sum(); });
  program.on(two, [&] { EXPECT_THROWS_WITH(loss.backward(), "a DTensor has no storage of its own"); });
  program.on(one, [&] { largest = x.pow(3); });
  program.on(two, [&] { largest = DTensor(std::get<0>(largest.max(1)).sum()).full_tensor(); });
  program.on(one, [&] { EXPECT_THROWS_WITH(largest.backward(), "a DTensor has no storage of its own"); });
  expect_no_races();
}

/// Beside a plain tensor, where its storage is its own.
TEST_F(Streams, ADTensorThatBecameWholeIsReadInABackward) {
  torch::nn::Linear linear(3, 4);
  const auto expected = 2 * linear->weight.detach();
  fully_shard(*linear, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  torch::Tensor doubled;
  {
    const torch::NoGradGuard no_grad;
    doubled = 2 * linear->weight;
    EXPECT_TRUE(is_dtensor(doubled));
  }
  const auto mask = torch::ones({4, 3}, sim::kDevice).set_requires_grad(true);
  (mask * doubled).sum().backward();
  if (world_rank() == 0) EXPECT_TRUE(torch::equal(mask.grad().cpu(), expected));
  expect_no_races();
}

/// Which parameters were used is kept on the device, in memory of the stream of the first backward.
TEST_F(Streams, AModelMayEndWhileAnotherStreamReadsWhatWasUsed) {
  const auto one = sim::new_stream("one"), two = sim::new_stream("two");
  for (const int layers : {2, 80}) { // whose gradients are copied piece by piece, and in one launch
    torch::nn::Sequential net;
    torch::manual_seed(0);
    for (int i = 0; i < layers; ++i) net->push_back(torch::nn::Linear(2, 2));
    fully_shard(net, world_mesh());
    const auto& group = *fsdp(*net).state()->group();
    const int64_t parameters = 2 * layers;
    const auto layout = internal::plan_reduce(group.layout(), std::vector<bool>(static_cast<size_t>(parameters), true));
    const int64_t row = layout.chunk_numel - layout.used_offset, ranks = world_size();
    const auto x = torch::ones({2, 2}, sim::kDevice);
    InOneOrder program;
    for (const auto& stream : {one, two}) {
      program.on(stream, [&] {
        net->forward(x).sum().backward();
        net->zero_grad(); // gradients are the program's
      });
    }
    net = nullptr;
    const c10::StreamGuard guard(one);
    for (const int64_t numel : {parameters, row, ranks * row}) write_memory_of(numel * static_cast<int64_t>(sizeof(float)));
    expect_no_races();
  }
}

} // namespace
} // namespace tessera::testing::program_streams_test
