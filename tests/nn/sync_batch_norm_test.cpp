// BatchNorm over the rows of all ranks, against LibTorch's BatchNorm of one process that has the whole batch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/nn/sync_batch_norm.h>

#include <functional>
#include <map>
#include <numeric>

#include <tessera/tests/support/line_mesh.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::sync_batch_norm_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kChannels = 3;

Tensor here(const Tensor& tensor) { return tensor.to(test_device()); }

SyncBatchNorm synced_norm(const nn::BatchNormOptions& options = nn::BatchNormOptions(kChannels)) {
  SyncBatchNorm norm(options, line_mesh());
  norm->to(test_device());
  return norm;
}

/// The rows of each rank.
struct Split {
  std::string name;
  std::function<int64_t(int64_t)> rows_of; // rank
  int64_t begin(int64_t rank) const {
    int64_t rows = 0;
    for (int64_t before = 0; before < rank; ++before) rows += rows_of(before);
    return rows;
  }
  int64_t rows() const { return begin(world_size()); }
  Tensor own(const Tensor& whole) const { return whole.narrow(0, begin(world_rank()), rows_of(world_rank())); }
};

std::vector<Split> splits() {
  return {{"even", [](int64_t) { return 6; }},
          {"uneven", [](int64_t rank) { return 5 + 2 * (rank % 3); }},
          {"one row on the last rank", [](int64_t rank) { return rank == last_rank() && rank > 0 ? 1 : 6; }},
          {"none on the first rank", [](int64_t rank) { return rank == 0 && world_size() > 1 ? 0 : 6; }},
          {"all on the last rank", [](int64_t rank) { return rank == last_rank() ? 7 : 0; }}};
}

/// One module under test, and LibTorch's.
struct Pair {
  std::shared_ptr<nn::Module> whole, synced;
  std::function<Tensor(const Tensor&)> run_whole, run_synced;
};

template <typename Norm>
Pair converted(const nn::BatchNormOptions& options) {
  Norm whole(options), synced(options);
  synced->to(test_device());
  EXPECT_EQ(convert_sync_batch_norm(*synced, line_mesh()), std::vector<std::string>{""});
  return {whole.ptr(), synced.ptr(), [whole](const Tensor& x) mutable { return whole(x); },
          [synced](const Tensor& x) mutable { return synced(x); }};
}

template <typename Norm>
Pair of_our_own(const nn::BatchNormOptions& options) {
  Norm whole(options);
  auto synced = synced_norm(options);
  return {whole.ptr(), synced.ptr(), [whole](const Tensor& x) mutable { return whole(x); },
          [synced](const Tensor& x) mutable { return synced(x); }};
}

struct Kind {
  std::string name;
  std::vector<int64_t> behind; // the sizes after [N, C]
  std::function<Pair(const nn::BatchNormOptions&)> make;
  bool takes_one_value = true; // on a rank
};

std::vector<Kind> kinds() {
  return {{"BatchNorm1d of [N, C]", {}, converted<nn::BatchNorm1d>, false},
          {"BatchNorm1d", {5}, converted<nn::BatchNorm1d>},
          {"BatchNorm2d", {2, 3}, converted<nn::BatchNorm2d>},
          {"BatchNorm3d", {2, 1, 2}, converted<nn::BatchNorm3d>},
          {"SyncBatchNorm of [N, C]", {}, of_our_own<nn::BatchNorm1d>},
          {"SyncBatchNorm", {2, 3}, of_our_own<nn::BatchNorm2d>}};
}

std::vector<nn::BatchNormOptions> options() {
  return {nn::BatchNormOptions(kChannels), nn::BatchNormOptions(kChannels).momentum(std::nullopt).eps(1e-3),
          nn::BatchNormOptions(kChannels).affine(false), nn::BatchNormOptions(kChannels).track_running_stats(false).momentum(0.3),
          nn::BatchNormOptions(kChannels).affine(false).track_running_stats(false)};
}

std::vector<int64_t> shape(int64_t rows, const std::vector<int64_t>& behind) {
  std::vector<int64_t> sizes{rows, kChannels};
  sizes.insert(sizes.end(), behind.begin(), behind.end());
  return sizes;
}

Tensor sum_over_ranks(const Tensor& value, const std::string& label) {
  auto sum = value.detach().clone();
  line_mesh().communicator()->all_reduce(sum, ReduceOp::kSum, label).wait();
  return sum;
}

/// The largest difference, beside the largest of the expected values where that is above 1.
double difference(const Tensor& actual, const Tensor& expected) {
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  if (actual.numel() == 0) return 0;
  return ((actual.cpu() - expected).abs().max() / expected.abs().max().clamp_min(1)).item<double>();
}

class DefaultDtype {
 public:
  explicit DefaultDtype(torch::Dtype dtype) { torch::set_default_dtype(c10::scalarTypeToTypeMeta(dtype)); }
  ~DefaultDtype() { torch::set_default_dtype(before_); }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;

 private:
  caffe2::TypeMeta before_ = torch::get_default_dtype();
};

/// Trains both for three batches, then evaluates; the largest difference of outputs, gradients and buffers.
double difference_of_training(const Pair& pair, const Split& split, const std::vector<int64_t>& behind, torch::Dtype dtype) {
  double largest = 0;
  const auto note = [&](const Tensor& actual, const Tensor& expected) {
    largest = std::max(largest, difference(actual, expected));
  };
  torch::manual_seed(1);
  const auto compare_forward = [&] {
    const auto x = torch::randn(shape(split.rows(), behind), dtype) * 2 + 1;
    const auto weights = torch::randn_like(x);
    const auto whole_x = x.clone().requires_grad_(), own_x = here(split.own(x).clone()).requires_grad_();
    const auto expected = pair.run_whole(whole_x), actual = pair.run_synced(own_x);
    note(actual, split.own(expected));
    (expected * weights).sum().backward();
    (actual * here(split.own(weights))).sum().backward();
    note(own_x.grad(), split.own(whole_x.grad()));
  };
  const auto parameters = pair.synced->named_parameters(), buffers = pair.synced->named_buffers();
  for (int step = 0; step < 3; ++step) {
    for (const auto& module : {pair.whole, pair.synced}) module->zero_grad();
    compare_forward();
    for (const auto& item : pair.whole->named_parameters())
      note(sum_over_ranks(parameters[item.key()].grad(), item.key()), item.value().grad());
  }
  for (const auto& item : pair.whole->named_buffers()) {
    if (item.value().defined()) note(buffers[item.key()].to(torch::kDouble), item.value().to(torch::kDouble));
  }
  pair.whole->eval();
  pair.synced->eval();
  compare_forward();
  return largest;
}

struct Case {
  Kind kind;
  Split split;
  nn::BatchNormOptions options;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& kind : kinds()) {
    for (const auto& split : splits()) {
      if (!kind.takes_one_value && split.name == "one row on the last rank") continue;
      for (const auto& each : options()) all.push_back({kind, split, each});
    }
  }
  return all;
}

TEST(SyncBatchNorm, IsThatOfOneProcessWithTheWholeBatch) {
  double largest = 0;
  const double tolerance = test_device_type() == c10::kCUDA ? 3e-6 : 1e-6; // CUDA's kernel sums in float
  for (const auto& [kind, split, each] : sweep(cases(), 50)) {
    SCOPED_TRACE(c10::str(kind.name, ", ", split.name, ", affine ", each.affine(), ", tracks ", each.track_running_stats()));
    const auto in_float = difference_of_training(kind.make(each), split, kind.behind, torch::kFloat);
    EXPECT_LE(in_float, tolerance);
    largest = std::max(largest, in_float);
  }
  const DefaultDtype doubles(torch::kDouble);
  for (const auto& kind : kinds())
    EXPECT_LE(difference_of_training(kind.make(options()[0]), splits()[1], kind.behind, torch::kDouble), 1e-13) << kind.name;
  if (world_rank() == 0) std::cout << "largest difference in float on " << world_size() << " ranks: " << largest << '\n';
}

TEST(SyncBatchNorm, HasTheSameRunningStatisticsOnAllRanks) {
  nn::BatchNorm2d norm(kChannels);
  norm->to(test_device());
  convert_sync_batch_norm(*norm, line_mesh());
  torch::manual_seed(world_rank());
  for (int step = 0; step < 3; ++step) norm(here(torch::randn({2 + world_rank(), kChannels, 5, 5})));
  for (const auto& item : norm->named_buffers()) {
    auto first = item.value().clone();
    line_mesh().communicator()->broadcast(first, 0, item.key()).wait();
    EXPECT_TENSORS_EQUAL(item.value(), first);
  }
}

struct Net : nn::Module {
  Tensor forward(const Tensor& x) { return head->forward(relu(norm(convolution(x))).mean({2, 3})); }
  nn::Conv2d convolution{register_module("convolution", nn::Conv2d(nn::Conv2dOptions(2, kChannels, 2).bias(false)))};
  nn::BatchNorm2d norm{register_module("norm", nn::BatchNorm2d(kChannels))};
  nn::ReLU relu{register_module("relu", nn::ReLU(nn::ReLUOptions().inplace(true)))};
  nn::Sequential head{register_module("head", nn::Sequential(nn::Linear(kChannels, 4), nn::BatchNorm1d(4), nn::Linear(4, 1)))};
};

std::shared_ptr<Net> make_net() {
  torch::manual_seed(3);
  auto net = std::make_shared<Net>();
  net->to(torch::kDouble);
  return net;
}

TEST(ConvertSyncBatchNorm, KeepsTypesNamesParametersAndBuffers) {
  const auto net = make_net(), untouched = make_net();
  const auto parameters = net->named_parameters(), buffers = net->named_buffers();
  EXPECT_EQ(convert_sync_batch_norm(*net, line_mesh()), (std::vector<std::string>{"norm", "head.1"}));
  EXPECT_EQ(convert_sync_batch_norm(*net, line_mesh()), (std::vector<std::string>{"norm", "head.1"})); // again: the same
  const auto same = [](const auto& now, const auto& before) {
    ASSERT_EQ(now.keys(), before.keys());
    for (const auto& item : now) EXPECT_TRUE(item.value().is_same(before[item.key()])) << item.key();
  };
  same(net->named_parameters(), parameters);
  same(net->named_buffers(), buffers);
  EXPECT_NE(net->children()[1]->as<nn::BatchNorm2d>(), nullptr);
  EXPECT_TRUE(internal::is_synchronized(net->norm->running_mean));
  EXPECT_FALSE(internal::is_synchronized(untouched->norm->running_mean));
  net->to(torch::kFloat);
  EXPECT_TRUE(internal::is_synchronized(net->norm->running_mean));
  EXPECT_FALSE(internal::is_synchronized(net->norm->running_mean.clone()));
  EXPECT_FALSE(internal::is_synchronized(net->norm->running_mean.view({-1, 1})));
  std::stringstream file;
  torch::save(untouched, file);
  torch::load(const_cast<std::shared_ptr<Net>&>(net), file);
  EXPECT_TRUE(internal::is_synchronized(net->norm->running_mean));
  EXPECT_TRUE(convert_sync_batch_norm(*nn::Linear(1, 1), line_mesh()).empty());
}

enum class Order { kBefore, kAfter, kOnMeta };

void reset(nn::Module& module) {
  if (auto* norm = module.as<nn::BatchNorm2d>()) norm->reset_parameters();
  if (auto* norm = module.as<nn::BatchNorm1d>()) norm->reset_parameters();
}

std::shared_ptr<Net> sharded_net(Order order, const DeviceMesh& mesh, BufferLayout layout) {
  auto net = order == Order::kOnMeta ? on_meta(make_net) : make_net();
  FullyShardOptions options;
  options.layout = layout;
  if (order != Order::kAfter) convert_sync_batch_norm(*net, mesh);
  fully_shard(*net->head, mesh, options);
  fully_shard(*net, mesh, options);
  if (order == Order::kAfter) convert_sync_batch_norm(*net, mesh);
  if (order != Order::kOnMeta) return net;
  materialize(*net, reset);
  const torch::NoGradGuard no_grad;
  const auto values = make_net()->named_parameters();
  for (auto& item : net->named_parameters()) item.value().copy_(values[item.key()]);
  return net;
}

/// Four steps on the whole batch or on this rank's part of it; the losses are means over equal parts.
void train(Net& net, int64_t parts, int64_t part) {
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::manual_seed(5);
  for (int step = 0; step < 4; ++step) {
    const auto x =
        torch::randn({12, 2, 4, 4}, torch::kDouble).chunk(parts)[static_cast<size_t>(part)].to(net.norm->running_mean.device());
    optimizer.zero_grad();
    (net.forward(x) - x.mean({1, 2, 3}).unsqueeze(1)).square().mean().backward();
    optimizer.step();
  }
}

TEST(ConvertSyncBatchNorm, TrainsAShardedModelAsOneProcessDoes) {
  const auto whole = make_net();
  train(*whole, 1, 0);
  const bool is_even = world_size() % 2 == 0;
  for (const auto& mesh :
       {line_mesh(), init_device_mesh(test_device_type(), {is_even ? 2 : 1, is_even ? world_size() / 2 : world_size()})}) {
    for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
      for (const auto order : {Order::kBefore, Order::kAfter, Order::kOnMeta}) {
        SCOPED_TRACE(c10::str(mesh.to_string(), ", order ", static_cast<int>(order)));
        const auto net = sharded_net(order, mesh, layout);
        train(*net, world_size(), world_rank());
        const auto parameters = whole->named_parameters(), buffers = whole->named_buffers();
        for (const auto& item : net->named_parameters())
          EXPECT_TENSORS_CLOSE(DTensor(item.value()).full_tensor().detach(), parameters[item.key()].detach(), 1e-11, 1e-11);
        for (const auto& item : net->named_buffers()) EXPECT_TENSORS_CLOSE(item.value(), buffers[item.key()], 1e-11, 1e-11);
        whole->eval();
        net->eval();
        const torch::NoGradGuard no_grad;
        const auto x = torch::ones({1 + world_rank(), 2, 4, 4}, torch::kDouble);
        EXPECT_TENSORS_CLOSE(net->forward(here(x)), whole->forward(x), 1e-11, 1e-11);
      }
    }
  }
}

TEST(ConvertSyncBatchNorm, ComputesInFloatUnderABFloat16Policy) {
  torch::manual_seed(4);
  nn::Sequential net(nn::Conv1d(2, kChannels, 1), nn::BatchNorm1d(kChannels)),
      whole(nn::Conv1d(2, kChannels, 1), nn::BatchNorm1d(kChannels));
  {
    const torch::NoGradGuard no_grad;
    for (const auto& item : net->named_parameters()) {
      item.value().copy_(item.value().to(torch::kBFloat16));
      whole->named_parameters()[item.key()].copy_(item.value());
    }
  }
  FullyShardOptions options;
  options.mixed_precision.param_dtype = torch::kBFloat16;
  convert_sync_batch_norm(*net, line_mesh());
  fully_shard(net, line_mesh(), options);
  const auto x = torch::randn({2 * world_size(), 2, 4}).to(torch::kBFloat16).to(torch::kFloat);
  const auto y = net->forward(here(x.narrow(0, 2 * world_rank(), 2)));
  EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
  const auto expected = whole->forward(x).narrow(0, 2 * world_rank(), 2);
  EXPECT_TENSORS_CLOSE(y.to(torch::kFloat).detach(), expected.detach(), 0.02, 0.02);
  const auto running = whole->named_buffers(), own = net->named_buffers();
  EXPECT_TENSORS_CLOSE(own["1.running_var"], running["1.running_var"], 0.01, 1e-3);
  y.to(torch::kFloat).square().mean().backward();
  EXPECT_EQ(net->named_parameters()["1.weight"].grad().scalar_type(), torch::kFloat);
  net->eval();
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(net->forward(here(x)).scalar_type(), torch::kBFloat16);
}

TEST(SyncBatchNorm, CommunicatesOnceInForwardAndOnceInBackwardAndNotInEvaluation) {
  auto& context = process_context();
  auto norm = synced_norm();
  const auto calls = [&] {
    const auto of = [&](CollectiveKind kind) { return context.count(kind).calls; };
    return std::pair(of(CollectiveKind::kAllGather), of(CollectiveKind::kAllReduce));
  };
  const auto x = torch::randn({4, kChannels}, test_device()).requires_grad_();
  context.reset_counters();
  norm(x).sum().backward();
  const int64_t once = world_size() > 1 ? 1 : calls().first; // a group of one rank sends nothing
  EXPECT_EQ(calls(), std::pair(once, once));
  norm->eval();
  context.reset_counters();
  norm(x).sum().backward();
  EXPECT_EQ(calls(), std::pair(int64_t{0}, int64_t{0}));
}

TEST(SyncBatchNorm, UpdatesTheStatisticsWithoutGradModeAndCanBeCloned) {
  auto norm = synced_norm();
  const auto copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone());
  torch::manual_seed(6);
  const auto x = torch::randn({2 * world_size(), kChannels}), own = here(x.narrow(0, 2 * world_rank(), 2));
  {
    const torch::NoGradGuard no_grad;
    norm(own);
  }
  const c10::InferenceMode inference;
  EXPECT_TENSORS_CLOSE(copy->forward(own),
                       torch::batch_norm(x, {}, {}, {}, {}, true, 0, 1e-5, false).narrow(0, 2 * world_rank(), 2));
  EXPECT_TENSORS_EQUAL(copy->running_mean, norm->running_mean);
  EXPECT_TENSORS_CLOSE(norm->running_mean, x.mean(0) * 0.1);
  EXPECT_THAT(c10::str(*norm), ::testing::HasSubstr("tessera::SyncBatchNorm(3, eps=1e-05, momentum=0.1, affine=true, "));
}

TEST(SyncBatchNorm, SaysWhatIsWrong) {
  auto norm = synced_norm();
  EXPECT_THROWS_WITH(norm(torch::ones({2})), "SyncBatchNorm: expected an input [N, 3, …], but got the shape [2]");
  EXPECT_THROWS_WITH(norm(torch::ones({2, 4})), "expected an input [N, 3, …], but got the shape [2, 4]");
  EXPECT_THROWS_WITH(norm(torch::ones({2, 3}, torch::kLong)), "expected a floating-point input, but got Long");
  const auto one = torch::ones({world_rank() == 0 ? 1 : 0, kChannels}, test_device());
  EXPECT_THROWS_WITH(norm(one), "expected more than 1 value per channel when training, but all ranks together have 1");
  EXPECT_EQ(norm(torch::ones({0, kChannels}, test_device())).numel(), 0); // no rank has any: nothing is learned
  EXPECT_TENSORS_EQUAL(norm->running_var, torch::ones({kChannels}));
  const Tensor spread(distribute_tensor(torch::ones({8, kChannels}), line_mesh(), {Shard{0}}));
  EXPECT_THROWS_WITH(norm(spread), "SyncBatchNorm: expected this rank's rows as a plain tensor, but got a DTensor");
  const auto x = torch::randn({2, kChannels}, test_device()).requires_grad_();
  EXPECT_THROWS_WITH(torch::autograd::grad({norm(x).square().sum()}, {x}, {}, true, /*create_graph=*/true),
                     "SyncBatchNorm: its gradient cannot be differentiated again (create_graph)");
  EXPECT_THROWS_WITH(SyncBatchNorm(kChannels, DeviceMesh()), "SyncBatchNorm: the mesh is undefined");
  EXPECT_THROWS_WITH(convert_sync_batch_norm(*norm, DeviceMesh()), "convert_sync_batch_norm: the mesh is undefined");
  nn::Sequential net{nn::BatchNorm1d(kChannels)};
  convert_sync_batch_norm(*net, line_mesh());
  EXPECT_THROWS_WITH(net->forward(torch::ones({2, 4})), "0: expected an input [N, 3, …], but got the shape [2, 4] on rank 0");
  const c10::InferenceMode inference;
  nn::Sequential made_there{nn::BatchNorm1d(kChannels)};
  EXPECT_THROWS_WITH(convert_sync_batch_norm(*made_there, line_mesh()), "the running_mean of 0 was made in InferenceMode");
}

/// One rank of several does something else.
bool is_odd() { return world_rank() == last_rank(); }

std::vector<std::pair<std::string, std::function<Tensor(const Tensor&)>>> norms(const nn::BatchNormOptions& options) {
  auto own = synced_norm(options);
  nn::BatchNorm1d converted(options);
  converted->to(test_device());
  convert_sync_batch_norm(*converted, line_mesh());
  return {{"SyncBatchNorm", [own](const Tensor& x) mutable { return own(x); }},
          {"converted", [converted](const Tensor& x) mutable { return converted(x); }}};
}

TEST(SyncBatchNorm, IsAnErrorOnEveryRankWhereOneHasAWrongInput) {
  const auto right = torch::randn({4, kChannels}, test_device());
  const std::map<std::string, Tensor> wrong{
      {"expected an input [N, 3, …], but got the shape [4, 5]", torch::ones({4, 5}, test_device())},
      {"expected a floating-point input, but got Long", here(torch::ones({4, kChannels}, torch::kLong))},
      {"but got a DTensor", distribute_tensor(torch::ones({4, kChannels}), line_mesh(), {Replicate{}})},
      {"expected values, but got a meta tensor", right.to(torch::kMeta)}};
  for (const auto& affine : {true, false}) {
    for (const auto& tracks : {true, false}) {
      for (const auto& [name, run] : norms(nn::BatchNormOptions(kChannels).affine(affine).track_running_stats(tracks))) {
        for (const auto& [part, input] : wrong) {
          SCOPED_TRACE(name + ", " + part);
          const auto message = error_of([&, &run = run, &input = input] { run(is_odd() ? input : right); });
          EXPECT_NE(message.find(part), std::string::npos) << message;
          EXPECT_NE(message.find("on rank " + std::to_string(last_rank())), std::string::npos) << message;
          EXPECT_EQ(message.find("on rank 0;"), std::string::npos) << message;
          EXPECT_NO_THROW(run(right)); // the next one works
        }
      }
    }
  }
}

/// The odd rank's input, and what of the module trains there, is another.
struct Difference {
  std::string name;
  bool needs_gradient = true, odd_needs_gradient = true, odd_is_affine = true, odd_has_rows = true;
  torch::Dtype odd_dtype = torch::kDouble;
};

/// `odd`: whether this rank is the one that differs. Against one process that has all rows.
void compare(const Difference& each, bool odd, const Split& split) {
  torch::manual_seed(8);
  auto x = torch::randn({split.rows(), kChannels}, torch::kDouble);
  if (each.odd_dtype != torch::kDouble) x = x.to(torch::kBFloat16).to(torch::kDouble);
  const auto weights = torch::randn_like(x);
  const bool needs = odd ? each.odd_needs_gradient : each.needs_gradient, is_affine = !odd || each.odd_is_affine;
  SyncBatchNorm norm(kChannels, line_mesh());
  norm->to(test_device(), torch::kDouble);
  for (auto& parameter : norm->parameters()) parameter.requires_grad_(is_affine);
  const auto own = here(split.own(x).clone().to(odd ? each.odd_dtype : torch::kDouble)).requires_grad_(needs);
  const auto y = norm(own);
  if (y.requires_grad()) (y.to(torch::kDouble) * here(split.own(weights))).sum().backward();

  const auto whole = x.clone().requires_grad_();
  const auto expected = torch::batch_norm(whole, {}, {}, {}, {}, true, 0, 1e-5, false);
  (expected * weights).sum().backward();
  const double tolerance = each.odd_dtype == torch::kDouble ? 1e-12 : each.odd_dtype == torch::kFloat ? 1e-5 : 3e-2;
  EXPECT_TENSORS_CLOSE(y.to(torch::kDouble).detach(), split.own(expected).detach(), tolerance, tolerance);
  EXPECT_EQ(own.grad().defined(), needs);
  if (needs) {
    EXPECT_TENSORS_CLOSE(own.grad().to(torch::kDouble), split.own(whole.grad()), tolerance, tolerance);
  }
  EXPECT_EQ(norm->weight.grad().defined(), is_affine);
  if (is_affine) {
    EXPECT_TENSORS_CLOSE(norm->bias.grad(), split.own(weights).sum(0), tolerance, tolerance);
  }
}

TEST(SyncBatchNorm, WorksWhereRanksNeedDifferentGradients) {
  const std::vector<Difference> differences{
      {.name = "an input without gradient", .odd_needs_gradient = false},
      {.name = "an input with gradient", .needs_gradient = false},
      {.name = "frozen parameters", .odd_is_affine = false},
      {.name = "nothing that trains", .odd_needs_gradient = false, .odd_is_affine = false},
      {.name = "no rows and nothing that trains", .odd_needs_gradient = false, .odd_is_affine = false, .odd_has_rows = false},
      {.name = "float", .odd_dtype = torch::kFloat},
      {.name = "bfloat16", .odd_needs_gradient = false, .odd_dtype = torch::kBFloat16}};
  for (const auto& each : differences) {
    for (const auto odd : {int64_t{0}, last_rank()}) {
      SCOPED_TRACE(c10::str(each.name, " on rank ", odd));
      const bool has_rows = each.odd_has_rows || world_size() == 1;
      compare(each, world_rank() == odd, {"", [&](int64_t rank) { return has_rows || rank != odd ? 4 : 0; }});
    }
  }
}

TEST(SyncBatchNorm, IsAnErrorInABackwardThatSomeRanksCannotRun) {
  if (world_size() == 1) return;
  auto norm = synced_norm();
  const auto x = torch::randn({4, kChannels}, test_device()).requires_grad_();
  const torch::AutoGradMode grad_mode(!is_odd());
  const auto y = norm(x);
  EXPECT_EQ(y.requires_grad(), !is_odd());
  if (is_odd()) return;
  EXPECT_THROWS_WITH(y.sum().backward(),
                     "its backward runs on all ranks, but rank " + std::to_string(last_rank()) + " ran the forward without");
}

/// The last test: the ranks' group cannot be used after it.
TEST(RanksThatNormalizeDifferentThings, GetAnError) {
  if (world_size() == 1) return;
  auto narrow = synced_norm(), wide = synced_norm(kChannels + 1);
  const bool first = world_rank() == 0;
  EXPECT_THROWS_WITH(first ? narrow(here(torch::ones({2, kChannels}))) : wide(here(torch::ones({2, kChannels + 1}))),
                     "all_gather");
}

} // namespace
} // namespace tessera::testing::sync_batch_norm_test
