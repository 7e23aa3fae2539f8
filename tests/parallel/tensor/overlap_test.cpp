// Products in chunks beside their collectives: the same numbers and bytes as one after the other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/strict_sharding.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/overlap/chunked_product.h>
#include <tessera/parallel/overlap/overlap_choice.h>

#include <tessera/tests/fsdp/parallel_mlp.h>
#include <tessera/tests/parallel/parallel_gpt.h>
#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/matchers.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing::overlap_test {
namespace {

using torch::Tensor;

DeviceMesh tensor_mesh() { return init_device_mesh(test_device_type(), {world_size()}, {"tp"}); }

ParallelizeOptions in_chunks(int64_t chunks) { return {.overlap = {.when = Overlap::kAlways, .chunks = chunks}}; }

// The products alone.

struct Sizes {
  std::vector<int64_t> activation;
  int64_t dim, features;
};

std::vector<Sizes> activations() {
  return {{{2, 12, 5}, 1, 7}, {{1, 13, 5}, 1, 3},   {{3, 13, 4}, 1, 6}, {{13, 3, 4}, 0, 6},
          {{7, 5}, 0, 2},     {{2, 3, 6, 4}, 2, 5}, {{2, 1, 4}, 1, 3},  {{2, 5, 4}, 1, 1}};
}

Tensor part_of(const Tensor& whole, int64_t dim, const DeviceMesh& mesh) {
  return DTensor(distribute_tensor(whole, mesh, {Shard{dim}})).local();
}

TEST(ChunkedProduct, GathersAsItMultiplies) {
  const auto mesh = tensor_mesh();
  for (const auto& sizes : activations()) {
    for (const int64_t most : {1, 2, 3, 4, 20}) {
      SCOPED_TRACE(c10::str(c10::IntArrayRef(sizes.activation), " along ", sizes.dim, ", ", most, " chunks"));
      torch::manual_seed(4);
      const auto x = torch::randn(sizes.activation, torch::kDouble);
      const auto weight = torch::randn({sizes.features, x.size(-1)}, torch::kDouble).t();
      const internal::parallel::SequenceChunks chunks(mesh, sizes.dim, x.size(sizes.dim), most);
      EXPECT_LE(chunks.count(), most);
      const auto result = internal::parallel::gather_product(part_of(x, sizes.dim, mesh), weight, chunks, "a test");
      EXPECT_TENSORS_EQUAL(result.whole, x);
      EXPECT_TENSORS_CLOSE(result.product, torch::matmul(x, weight), 1e-13, 1e-14);
    }
  }
}

TEST(ChunkedProduct, ScattersAsItMultiplies) {
  const auto mesh = tensor_mesh();
  for (const auto& sizes : activations()) {
    for (const int64_t most : {1, 2, 3, 4, 20}) {
      SCOPED_TRACE(c10::str(c10::IntArrayRef(sizes.activation), " along ", sizes.dim, ", ", most, " chunks"));
      torch::manual_seed(4 + world_rank());
      const auto x = torch::randn(sizes.activation, torch::kDouble);
      const auto weight = torch::randn({x.size(-1), sizes.features}, torch::kDouble);
      const internal::parallel::SequenceChunks chunks(mesh, sizes.dim, x.size(sizes.dim), most);
      const auto own = internal::parallel::scatter_product(x, weight, chunks, "a test");
      const auto whole = DTensor(from_local(torch::matmul(x, weight), mesh, {Partial{}})).full_tensor();
      EXPECT_TENSORS_CLOSE(own, part_of(whole, sizes.dim, mesh), 1e-12, 1e-13);
    }
  }
}

// A GPT whose layers overlap, beside one whose layers do not, and one process.

Tensor loss_of(gpt::Gpt& model, const Tokens& tokens) {
  return torch::cross_entropy_loss(model->forward(tokens.inputs).flatten(0, 1), tokens.targets.flatten());
}

struct Case {
  bool sequence = true, recomputes = false, strict = true;
  int64_t batch = 2, time = 12, chunks = 3;
  torch::Dtype dtype = torch::kDouble;
};

/// Four steps of SGD with clipping.
void compare(const Case& each) {
  const double bound = each.dtype == torch::kDouble ? 1e-11 : 1e-5;
  auto twin = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
  for (auto* net : {&twin, &model}) (*net)->to(each.dtype);
  parallelize(*model, tensor_mesh(), gpt_plan(each.sequence), in_chunks(each.chunks));
  model->set_recompute(each.recomputes);
  torch::optim::SGD reference(twin->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  const auto strict = each.strict ? std::make_unique<StrictSharding>() : nullptr;
  for (int64_t step = 0; step < 4; ++step) {
    const auto tokens = draw_tokens(step, each.batch, each.time);
    const auto expected = loss_of(twin, tokens), loss = loss_of(model, tokens);
    ASSERT_NEAR(loss.item<double>(), expected.item<double>(), bound) << "step " << step;
    reference.zero_grad();
    optimizer.zero_grad();
    expected.backward();
    loss.backward();
    const auto norm = clip_grad_norm_(*model, 0.5).item<double>();
    ASSERT_NEAR(norm, clip_grad_norm_(*twin, 0.5).item<double>(), bound) << "step " << step;
    reference.step();
    optimizer.step();
  }
  const auto expected = twin->named_parameters();
  for (const auto& item : model->named_parameters()) {
    const bool is_double = each.dtype == torch::kDouble;
    EXPECT_TENSORS_CLOSE(whole_of(item.value()), expected[item.key()].detach(), is_double ? 1e-9 : 1e-4, is_double ? 1e-11 : 1e-5)
        << item.key();
  }
}

TEST(Overlap, TrainsAsOneProcess) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) compare({.dtype = dtype});
  for (const int64_t chunks : {1, 2, 50}) compare({.chunks = chunks});
  compare({.batch = 1, .time = 13});
  compare({.strict = false, .batch = 3, .time = 5}); // the last of 4 ranks has nothing
  compare({.strict = false, .batch = 3, .time = 1});
  compare({.sequence = false});
  compare({.recomputes = true});
}

/// What runs in chunks and what does not differ by the rounding of sums in another order.
TEST(Overlap, GivesTheNumbersOfLayersThatDoNot) {
  auto apart = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
  parallelize(*apart, tensor_mesh(), gpt_plan(/*sequence=*/true));
  parallelize(*model, tensor_mesh(), gpt_plan(/*sequence=*/true), in_chunks(2));
  const auto tokens = draw_tokens(0, 2, 13);
  const auto expected = apart->forward(tokens.inputs), logits = model->forward(tokens.inputs);
  EXPECT_TENSORS_CLOSE(whole_of(logits), whole_of(expected), 1e-6, 1e-6);
  const auto again = model->forward(tokens.inputs);
  EXPECT_TENSORS_EQUAL(whole_of(logits), whole_of(again)) << "two runs";
  expected.square().mean().backward();
  logits.square().mean().backward();
  const auto parameters = apart->named_parameters();
  for (const auto& item : model->named_parameters())
    EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), whole_of(parameters[item.key()].grad()), 1e-4, 1e-6) << item.key();
  const torch::InferenceMode inference;
  EXPECT_TENSORS_CLOSE(whole_of(model->forward(tokens.inputs)), whole_of(logits), 1e-6, 1e-6);
}

struct Traffic {
  CollectiveCounters::Count all_reduce, all_gather, reduce_scatter;
  explicit Traffic(const CountCollectives& counter)
      : all_reduce(counter.count(CollectiveKind::kAllReduce)),
        all_gather(counter.count(CollectiveKind::kAllGather)),
        reduce_scatter(counter.count(CollectiveKind::kReduceScatter)) {}
};

/// In forward the collective of each product comes in chunks, in backward that of each gradient which a Rowwise layer gathers.
TEST(Overlap, SendsAsManyBytesInMoreCollectives) {
  if (world_size() == 1) GTEST_SKIP() << "one rank sends nothing";
  const int64_t layers = 2, chunks = 3, products = 2 * layers;
  for (const int64_t time : {12, 13}) { // of which ranks have as many positions, or not
    const auto up = [](int64_t count, int64_t parts) { return (count + parts - 1) / parts; };
    const int64_t longest = up(time, world_size()), of_each = up(longest, up(longest, chunks));
    const int64_t activation = 2 * longest * world_size() * 48 * 4;
    auto model = seeded_gpt(small_gpt(layers));
    parallelize(*model, tensor_mesh(), gpt_plan(/*sequence=*/true), in_chunks(chunks));
    const auto tokens = draw_tokens(0, 2, time);
    for (int step = 0; step < 2; ++step) { // the second one has its communicators
      const CountCollectives counter;
      const auto logits = model->forward(tokens.inputs);
      const Traffic forward(counter);
      const auto loss = gpt::cross_entropy(logits, tokens.targets);
      const CountCollectives in_backward;
      loss.backward();
      const Traffic backward(in_backward);
      if (step == 0) continue;
      // Gathered: the inputs of the packed projections, of `expand` and of the head. Scattered: what Rowwise gives, and the
      // table.
      EXPECT_EQ(forward.all_gather, (CollectiveCounters::Count{(products + 1) * of_each, (products + 1) * activation}));
      EXPECT_EQ(forward.reduce_scatter, (CollectiveCounters::Count{products * of_each + 1, (products + 1) * activation}));
      EXPECT_EQ(forward.all_reduce.calls, 0);
      // Gathered: the gradients of what Rowwise and the table gave, and once more the inputs of forward's.
      EXPECT_EQ(backward.all_gather,
                (CollectiveCounters::Count{products * of_each + 1 + products + 1, 2 * (products + 1) * activation}));
      EXPECT_EQ(backward.reduce_scatter, (CollectiveCounters::Count{products + 1, (products + 1) * activation}));
      EXPECT_EQ(backward.all_reduce.calls, 1);
    }
  }
}

TEST(Overlap, NotesItsMoves) {
  if (world_size() == 1) GTEST_SKIP() << "one rank moves nothing";
  torch::nn::Linear layer(12, 12);
  parallelize(*layer, tensor_mesh(), {{"", Colwise{.input = Shard{1}}}}, in_chunks(2));
  const LogRedistributions log;
  layer->forward(torch::ones({2, 3, 12}));
  EXPECT_THAT(log.to_string(), ::testing::HasSubstr("aten::matmul beside the parameter weight: [2, " +
                                                    std::to_string(3 * world_size()) + ", 12] (Shard(1)) -> (Replicate())"));
}

/// Layers that read one activation gather it once, and reduce the sum of its gradients once.
TEST(Overlap, SharesAnActivation) {
  const auto make = [] {
    torch::manual_seed(12);
    torch::nn::ModuleDict layers(
        std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{{"gate", torch::nn::Linear(8, 24).ptr()},
                                                                                {"up", torch::nn::Linear(8, 24).ptr()},
                                                                                {"down", torch::nn::Linear(24, 8).ptr()}});
    layers->to(torch::kDouble);
    return layers;
  };
  const auto run = [](torch::nn::ModuleDict& layers, const Tensor& x) {
    const auto call = [&](const char* name, const Tensor& input) {
      return layers[name]->as<torch::nn::Linear>()->forward(input);
    };
    return call("down", torch::silu(call("gate", x)) * call("up", x));
  };
  auto twin = make(), model = make();
  parallelize(*model, tensor_mesh(), {{"gate", Colwise{}}, {"up", Colwise{}}, {"down", Rowwise{.output = Shard{1}}}},
              in_chunks(2));
  torch::manual_seed(13);
  const auto whole = torch::randn({2, 8, 8}, torch::kDouble);
  auto expected_x = whole.clone().requires_grad_();
  auto x = distribute_tensor(whole, tensor_mesh(), {Shard{1}}).requires_grad_();
  const CountCollectives forward;
  const auto y = run(model, x);
  if (world_size() > 1) EXPECT_EQ(forward.count(CollectiveKind::kAllGather).calls, 2);
  const CountCollectives backward;
  y.square().sum().backward();
  if (world_size() > 1) {
    EXPECT_EQ(backward.count(CollectiveKind::kReduceScatter).calls, 1);
    EXPECT_EQ(backward.count(CollectiveKind::kAllGather).calls, 2 + 1); // the gradient in chunks, and the activation again
  }
  run(twin, expected_x).square().sum().backward();
  EXPECT_TENSORS_CLOSE(whole_of(x.grad()), expected_x.grad(), 1e-10, 1e-12);
  const auto expected = twin->named_parameters();
  for (const auto& item : model->named_parameters())
    EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), expected[item.key()].grad(), 1e-10, 1e-12) << item.key();
}

/// torch::linear is met whole, with its bias; 2-D activations are split over their rows.
TEST(Overlap, OfLinearWithABias) {
  for (const auto& [style, out, in] : std::vector<std::tuple<ParallelStyle, int64_t, int64_t>>{
           {Colwise{}, 12, 5}, {Colwise{.output = Replicate{}}, 12, 5}, {Rowwise{.output = Shard{0}}, 5, 12}}) {
    torch::manual_seed(14);
    torch::nn::Linear twin(in, out), model(in, out);
    for (auto* layer : {&twin, &model}) (*layer)->to(torch::kDouble);
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < 2; ++i) model->parameters()[i].copy_(twin->parameters()[i]);
    }
    parallelize(*model, tensor_mesh(), {{"", style}}, in_chunks(3));
    const auto whole = torch::randn({9, in}, torch::kDouble);
    auto x = distribute_tensor(whole, tensor_mesh(), {Shard{0}}).requires_grad_();
    auto expected_x = whole.clone().requires_grad_();
    const auto y = torch::linear(x, model->weight, model->bias);
    const auto expected = torch::linear(expected_x, twin->weight, twin->bias);
    EXPECT_TENSORS_CLOSE(whole_of(y), expected.detach(), 1e-12, 1e-13);
    y.square().sum().backward();
    expected.square().sum().backward();
    EXPECT_TENSORS_CLOSE(whole_of(x.grad()), expected_x.grad(), 1e-11, 1e-12);
    for (size_t i = 0; i < 2; ++i)
      EXPECT_TENSORS_CLOSE(whole_of(model->parameters()[i].grad()), twin->parameters()[i].grad(), 1e-11, 1e-12) << i;
  }
}

/// A penalty on the gradient of the activation, and gradients of some tensors alone.
TEST(Overlap, HasASecondDerivative) {
  const auto make = [] {
    torch::manual_seed(15);
    torch::nn::Sequential net(torch::nn::Linear(6, 12), torch::nn::Tanh(), torch::nn::Linear(12, 6));
    net->to(torch::kDouble);
    return net;
  };
  auto twin = make(), model = make();
  parallelize(*model, tensor_mesh(), {{"0", Colwise{}}, {"2", Rowwise{.output = Shard{1}}}}, in_chunks(2));
  const auto whole = torch::randn({2, 7, 6}, torch::kDouble);
  auto x = distribute_tensor(whole, tensor_mesh(), {Shard{1}}).requires_grad_();
  auto expected_x = whole.clone().requires_grad_();
  const auto penalty = [](torch::nn::Sequential& net, const Tensor& input) {
    const auto loss = net->forward(input).square().sum();
    const auto gradient = torch::autograd::grad({loss}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return loss + gradient.square().sum();
  };
  const auto loss = penalty(model, x), expected = penalty(twin, expected_x);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-9);
  loss.backward();
  expected.backward();
  EXPECT_TENSORS_CLOSE(whole_of(x.grad()), expected_x.grad(), 1e-9, 1e-11);
  for (size_t i = 0; i < 4; ++i)
    EXPECT_TENSORS_CLOSE(whole_of(model->parameters()[i].grad()), twin->parameters()[i].grad(), 1e-9, 1e-11) << i;
}

TEST(Overlap, OfFrozenLayersAndKeptGraphs) {
  for (const bool freezes_first : {true, false}) {
    auto twin = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
    for (auto* net : {&twin, &model}) {
      (*net)->to(torch::kDouble);
      for (auto& item : (*net)->named_parameters()) {
        const bool is_weight = item.value().dim() == 2,
                   is_first = item.key().find("qkv") != std::string::npos || item.key().find("expand") != std::string::npos;
        if (is_weight && is_first == freezes_first) item.value().requires_grad_(false);
      }
    }
    parallelize(*model, tensor_mesh(), gpt_plan(/*sequence=*/true), in_chunks(2));
    const auto tokens = draw_tokens(0, 2, 11);
    for (auto* net : {&twin, &model}) {
      const auto loss = loss_of(*net, tokens);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
    }
    const auto expected = twin->named_parameters();
    for (const auto& item : model->named_parameters()) {
      const auto& wanted = expected[item.key()].grad();
      ASSERT_EQ(item.value().grad().defined(), wanted.defined()) << item.key();
      if (wanted.defined()) EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), wanted, 1e-10, 1e-12) << item.key();
    }
  }
}

TEST(Overlap, AGraphServesOnce) {
  torch::nn::Linear layer(12, 12);
  parallelize(*layer, tensor_mesh(), {{"", Colwise{.input = Shard{1}}}}, in_chunks(2));
  const auto loss = layer->forward(torch::ones({2, 3, 12})).square().sum();
  loss.backward();
  EXPECT_ANY_THROW(loss.backward());
}

TEST(Overlap, UnderAutocastLayersRunAsEver) {
  torch::manual_seed(16);
  torch::nn::Linear layer(12, 12);
  parallelize(*layer, tensor_mesh(), {{"", Colwise{.input = Shard{1}}}}, in_chunks(2));
  const AutocastScope autocast;
  const auto y = layer->forward(torch::ones({2, 3, 12}));
  EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
  y.to(torch::kFloat).sum().backward();
  EXPECT_TRUE(whole_of(layer->weight.grad()).isfinite().all().item<bool>());
}

/// fully_shard over the data-parallel dims, with its own gathers in between.
TEST(Overlap, UnderFullyShard) {
  constexpr int64_t kRows = 12, kTime = 8;
  for (const auto& shape : parallel_shapes()) {
    const ParallelMesh mesh(shape);
    for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
      for (const bool recomputes : {false, true}) {
        SCOPED_TRACE(c10::str(mesh.all.to_string(), recomputes ? ", recomputed" : ""));
        auto twin = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
        for (auto* net : {&twin, &model}) (*net)->to(torch::kDouble);
        parallelize(*model, mesh.tensor_parallel, gpt_plan(/*sequence=*/true), in_chunks(2));
        for (const auto& block : *model->blocks()) fully_shard(*block, mesh.data_parallel, {.layout = layout});
        fully_shard(*model, mesh.data_parallel, {.layout = layout});
        model->set_recompute(recomputes);
        torch::optim::SGD reference(twin->parameters(), 0.2), optimizer(model->parameters(), 0.2);
        for (int64_t step = 0; step < 3; ++step) {
          const auto tokens = draw_tokens(step, kRows, kTime);
          const auto mine = [&](const Tensor& rows) { return rows.chunk(mesh.data_ranks())[mesh.data_rank()]; };
          reference.zero_grad();
          optimizer.zero_grad();
          loss_of(twin, tokens).backward();
          loss_of(model, {mine(tokens.inputs), mine(tokens.targets)}).backward();
          reference.step();
          optimizer.step();
        }
        const auto expected = twin->named_parameters();
        for (const auto& item : model->named_parameters())
          EXPECT_TENSORS_CLOSE(whole_of(item.value()), expected[item.key()].detach(), 1e-9, 1e-11) << item.key();
      }
    }
  }
}

/// Activations are cast before they are gathered.
TEST(Overlap, InParamDtype) {
  const ParallelMesh mesh(parallel_shapes().back());
  auto apart = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
  FullyShardOptions options;
  options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  const auto tokens = draw_tokens(0, 12, 8);
  const auto run = [&](gpt::Gpt& net, const ParallelizeOptions& parallel) {
    parallelize(*net, mesh.tensor_parallel, gpt_plan(/*sequence=*/true), parallel);
    fully_shard(*net, mesh.data_parallel, options);
    const auto loss = loss_of(net, tokens);
    loss.to(torch::kFloat).backward();
    return loss.item<double>();
  };
  const auto expected = run(apart, {}), loss = run(model, in_chunks(2));
  EXPECT_NEAR(loss, expected, 0.02);
  const auto parameters = apart->named_parameters();
  for (const auto& item : model->named_parameters()) {
    const auto wanted = whole_of(parameters[item.key()].grad());
    const auto difference = (whole_of(item.value().grad()) - wanted).norm().item<double>();
    EXPECT_LE(difference, 0.02 * wanted.norm().item<double>() + 1e-4) << item.key();
  }
}

// What is measured.

TEST(Overlap, IsMeasuredOnceASize) {
  const auto before = overlap_decisions().size();
  const ParallelizeOptions options{.overlap = {.when = Overlap::kMeasured, .chunks = 2, .smallest_measured = 0}};
  auto twin = seeded_gpt(small_gpt()), model = seeded_gpt(small_gpt());
  parallelize(*model, tensor_mesh(), gpt_plan(/*sequence=*/true), options);
  const auto tokens = draw_tokens(0, 3, 10);
  for (int step = 0; step < 2; ++step)
    EXPECT_NEAR(loss_of(model, tokens).item<double>(), loss_of(twin, tokens).item<double>(), 1e-5);
  const auto decisions = overlap_decisions();
  // Of both layers alike: two that gather, two that scatter; and the head.
  EXPECT_EQ(decisions.size() - before, world_size() == 1 ? 0U : 5U);
  for (size_t i = before; i < decisions.size(); ++i) {
    const auto& each = decisions[i];
    EXPECT_GT(each.apart_seconds, 0) << each.to_string();
    EXPECT_EQ(each.overlaps, each.overlapped_seconds < each.apart_seconds) << each.to_string();
    auto of_first = torch::tensor({each.apart_seconds, each.overlapped_seconds}, torch::kDouble);
    tensor_mesh().communicator()->broadcast(of_first, 0, "a decision").wait();
    EXPECT_EQ(of_first[0].item<double>(), each.apart_seconds) << "the same on all ranks";
    EXPECT_THAT(each.to_string(), ::testing::HasSubstr(each.overlaps ? ": overlaps" : ": stays apart"));
  }
  if (world_size() > 1)
    EXPECT_THAT(
        decisions.back().layer,
        ::testing::HasSubstr("beside the parameter token_embedding.weight: Float [3, 10, 48] (Shard(1)) x Float [48, 256] "
                             "(Shard(1)), gathered in 2 chunks on DeviceMesh("));
}

/// Work on this rank: a few products, or many.
void work(int64_t products) {
  const torch::NoGradGuard no_grad;
  const auto x = torch::ones({128, 128});
  for (int64_t i = 0; i < products; ++i) torch::mm(x, x);
}

/// The ranks may disagree about what is faster. The slowest of them decides, for all, and once.
TEST(Overlap, OfAllRanksIsDecidedAlike) {
  constexpr int64_t kFew = 1, kSome = 20, kMany = 400;
  const auto mesh = tensor_mesh();
  const bool is_first = mesh.local_rank() == 0;
  for (const bool first_is_slow_apart : {true, false}) {
    const auto size = c10::str("a size of the first rank's ", first_is_slow_apart);
    int64_t calls = 0;
    const auto way = [&](bool is_slow) { // on the first rank; on others it is slower than the other way, but less so
      return [&calls, is_first, is_slow] {
        ++calls;
        work(is_first ? (is_slow ? kMany : kFew) : (is_slow ? kFew : kSome));
      };
    };
    const internal::parallel::TwoWays ways{way(first_is_slow_apart), way(!first_is_slow_apart)};
    const bool overlaps = internal::parallel::overlap_is_faster(size, "a layer", mesh, ways);
    EXPECT_EQ(overlaps, first_is_slow_apart) << overlap_decisions().back().to_string();
    const auto decided = overlap_decisions().size();
    const auto measured = std::exchange(calls, 0);
    EXPECT_EQ(internal::parallel::overlap_is_faster(size, "another layer", mesh, ways), overlaps);
    EXPECT_GT(measured, 0);
    EXPECT_EQ(calls, 0) << "tried again";
    EXPECT_EQ(overlap_decisions().size(), decided);
    auto of_first = torch::tensor({overlaps ? 1 : 0, static_cast<int>(decided)});
    mesh.communicator()->broadcast(of_first, 0, "a decision").wait();
    EXPECT_EQ(of_first[0].item<bool>(), overlaps);
  }
}

TEST(Overlap, SmallProductsAreNotTried) {
  const auto before = overlap_decisions().size();
  auto model = seeded_gpt(small_gpt());
  parallelize(*model, tensor_mesh(), gpt_plan(/*sequence=*/true), {.overlap = {.when = Overlap::kMeasured}});
  const CountCollectives counter;
  model->forward(draw_tokens(0, 2, 12).inputs);
  EXPECT_EQ(counter.count(CollectiveKind::kAllGather).calls, world_size() == 1 ? 0 : 5);
  EXPECT_EQ(overlap_decisions().size(), before);
}

TEST(Overlap, ChunksAreAtLeastOne) {
  torch::nn::Linear layer(12, 12);
  EXPECT_THROWS_WITH(parallelize(*layer, tensor_mesh(), {{"", Colwise{}}}, in_chunks(0)), "0 chunks of an overlap; at least 1");
  EXPECT_FALSE(is_dtensor(layer->weight));
}

} // namespace
} // namespace tessera::testing::overlap_test
