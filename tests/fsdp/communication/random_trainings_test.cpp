// Random trainings whose gathers and reductions are in fewer bits, beside the plain means of what their ranks compute.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/checkpoint/communication_state.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/communication.h>
#include <tessera/fsdp/fsdp_module.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/optim/fused.h>
#include <tessera/optim/step.h>

#include <tessera/tests/fsdp/communication/all_strategies.h>
#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::random_trainings_test {
namespace {

using torch::Tensor;

constexpr int64_t kSmallest = 200; // of the numbers of a parameter that are coded
constexpr int kCodings = 3;        // of a reduction at most: a reduce-scatter, then an all-reduce
constexpr double kRounding = 1e-5; // of float, in what is added up here and there

bool is_coded(const Tensor& parameter) { return parameter.dim() > 1 && parameter.numel() >= kSmallest; }

/// What is drawn for one training.
struct Settings {
  explicit Settings(Draw& draw) : strategy(draw.of(all_strategies())) {
    auto& options = strategy.options;
    if (!strategy.replicates && draw.chance(70)) {
      gather = codec(draw);
      options.communication.gather = QuantizedGather{.codec = *gather, .smallest = kSmallest};
    }
    if (!gather || draw.chance(80)) draw_reduction(draw);
    if (draw.chance(20)) options.offload = offload_to_host(false);
    if (draw.chance(20)) options.offload = offload_to_files(std::filesystem::temp_directory_path());
    recomputes = draw.chance(30);
    adam = draw.chance(50);
  }

  std::string description() const {
    const auto name = [](const std::optional<BlockCodec>& codec) {
      return codec ? c10::str(to_string(codec->wire), " of ", codec->block) : std::string("plain");
    };
    return c10::str(strategy.name, ", gathers ", name(gather), ", reductions ", name(reduction), ", inside ", name(inner),
                    feeds_back ? ", feeding back" : "", recomputes ? ", recomputed" : "", adam ? ", AdamW" : ", SGD",
                    strategy.options.offload == OffloadPolicy{} ? "" : ", offloaded");
  }
  /// The largest error of a coding, in parts of the largest number that is coded.
  double error() const {
    if (!reduction) return 0;
    return std::max(reduction->largest_error(), inner ? inner->largest_error() : 0);
  }

  Strategy strategy;
  std::optional<BlockCodec> gather, reduction, inner;
  bool feeds_back = false, recomputes = false, adam = false;

 private:
  static BlockCodec codec(Draw& draw) {
    return {draw.of(std::vector{Wire::kInt8, Wire::kInt4, Wire::kFloat8}), draw.of(std::vector<int64_t>{8, 64, 256})};
  }
  void draw_reduction(Draw& draw) {
    reduction = codec(draw);
    if (draw.chance(30)) inner = codec(draw);
    feeds_back = draw.chance(60);
    strategy.options.communication.reduction =
        quantized_reduction({.codec = *reduction, .inner = inner, .smallest = kSmallest, .error_feedback = feeds_back});
  }
};

/// How far the result of a reduction may be from the plain mean, where no rank has a gradient above `largest`. Each coding adds
/// at most `error` of what it codes, and the next one codes what it made. With error feedback it codes what was kept as well, at
/// most `error` of the sum: so the sum is at most `largest` / (1 - `error`), and results together are from the means together by
/// what is kept now.
double bound_of(double largest, double error, bool feeds_back) {
  double bound = 0;
  for (int coding = 0; coding < kCodings; ++coding) {
    if (feeds_back) largest /= 1 - error;
    bound += error * largest;
    largest *= 1 + error;
  }
  return bound;
}

/// What the reductions of a parameter's gradients were to give, and gave.
struct Reduced {
  Tensor mean, got;           ///< together
  bool is_new = false;        ///< there were some since they were compared
  double largest = 0;         ///< of what a rank gave to a reduction
  double before = 0;          ///< the bound of what was kept when this began
  double bound = 0, size = 0; ///< of the difference, and of what was added up
};

double largest_on_ranks(const Tensor& values) {
  auto most = values.numel() == 0 ? torch::zeros({1}, torch::kDouble) : values.abs().max().to(torch::kDouble).view({1});
  init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0)->all_reduce(most, ReduceOp::kMax, "largest").wait();
  return most.item<double>();
}

class RandomTraining {
 public:
  explicit RandomTraining(uint64_t number) : draw_(number), settings_(draw_), net_(make_net()), twin_(make_net()) {
    shard_model(net_, settings_.strategy);
    optimizer_ = make_optimizer(net_);
    reduced_.resize(twin_->parameters().size());
  }

  std::string description() const { return settings_.description(); }

  void run() {
    const int64_t steps = 3 + draw_.below(3);
    for (int64_t step = 0; step < steps && !::testing::Test::HasFailure(); ++step) {
      if (draw_.chance(25)) freeze_or_thaw();
      if (draw_.chance(20)) resume();
      take_values_of_forward();
      if (draw_.chance(40)) evaluate();
      const bool skips_blocks = draw_.chance(15);
      const int64_t micro_batches = 1 + draw_.below(3);
      const bool reduces_each = draw_.chance(30);
      spoils_ = draw_.chance(15);
      for (int64_t i = 0; i < micro_batches; ++i) backward(3 * step + i, skips_blocks, reduces_each || i + 1 == micro_batches);
      if (spoils_) {
        EXPECT_FALSE(std::isfinite(clip_grad_norm_(*net_, 1.0).item<double>()));
        begin_anew();
      } else {
        compare_gradients();
        if (draw_.chance(30)) clip_grad_norm_(*net_, 1.0);
        tessera::step(*optimizer_);
      }
      optimizer_->zero_grad();
      twin_->zero_grad();
    }
  }

 private:
  std::unique_ptr<torch::optim::Optimizer> make_optimizer(Net& net) const {
    if (settings_.adam) return std::make_unique<FusedAdamW>(net->parameters(), torch::optim::AdamWOptions(1e-2));
    return std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  }

  Tensor loss(Net& net, const Tensor& tokens, bool skips_blocks, bool recomputes) const {
    auto x = net->embedded(tokens.slice(1, 0, -1));
    for (auto& block : *net->blocks) {
      const auto forward = [module = block](const Tensor& in) { return module->as<Block>()->forward(in); };
      if (!skips_blocks) x = recomputes ? recompute(forward, x) : forward(x);
    }
    const auto logits = torch::matmul(net->norm(x), net->embed->weight.t());
    return torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(-1)}),
                                                tokens.slice(1, 1).reshape({-1}).to(logits.device()));
  }

  /// The twin computes with what the codes say, which is the same on all ranks and within the error of two codings.
  void take_values_of_forward() {
    const torch::NoGradGuard no_grad;
    const auto parameters = net_->parameters(), twins = twin_->parameters();
    const auto ranks = init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto value = unsharded(parameters[i]).detach().clone().cpu(), exact = full(parameters[i]);
      auto least = value.reshape({-1}).clone();
      ranks->all_reduce(least, ReduceOp::kMin, "equal").wait();
      EXPECT_TENSORS_EQUAL(least, value.reshape({-1}));
      const double error = settings_.gather && is_coded(exact) ? settings_.gather->largest_error() : 0;
      EXPECT_LE((value - exact).abs().max().item<double>(),
                (error + error * (1 + error)) * 1.0001 * exact.abs().max().item<double>());
      twins[i].copy_(value);
    }
  }

  void evaluate() {
    const torch::NoGradGuard no_grad;
    const auto batch = own_batch(100);
    EXPECT_NEAR(loss(net_, batch, false, false).item<double>(), loss(twin_, batch, false, false).item<double>(), kRounding);
  }

  /// What was kept of the codes is forgotten in the group of the parameter, and stays in others.
  void freeze_or_thaw() {
    const auto i = static_cast<size_t>(draw_.below(static_cast<int64_t>(reduced_.size())));
    const bool trains = !twin_->parameters()[i].requires_grad();
    for (auto* net : {&net_, &twin_}) (*net)->parameters()[i].requires_grad_(trains);
    begin_anew();
  }

  /// The sums begin again, from what is kept of those of before.
  void begin_anew() {
    for (auto& each : reduced_) each = Reduced{.largest = each.largest, .before = settings_.feeds_back ? each.bound : 0};
  }

  void resume() {
    Net loaded = make_net(/*seed=*/7);
    for (size_t i = 0; i < reduced_.size(); ++i) loaded->parameters()[i].requires_grad_(twin_->parameters()[i].requires_grad());
    auto strategy = settings_.strategy;
    shard_model(loaded, strategy);
    auto optimizer = make_optimizer(loaded);
    auto saved = state_dict(*net_, *optimizer_, {.full_state_dict = true});
    auto target = state_dict(*loaded, *optimizer);
    load_state_dict(target, saved);
    auto kept = communication_state(*net_), taken = communication_state(*loaded);
    load_state_dict(taken, kept);
    net_ = loaded;
    optimizer_ = std::move(optimizer);
  }

  void backward(int64_t batch, bool skips_blocks, bool reduces) {
    const auto tokens = own_batch(batch);
    const double factor = spoils_ && world_rank() == last_rank() ? NAN : 1;
    if (reduces) {
      (loss(net_, tokens, skips_blocks, settings_.recomputes) * factor).backward();
    } else {
      const auto scope = no_sync(*net_);
      (loss(net_, tokens, skips_blocks, settings_.recomputes) * factor).backward();
    }
    loss(twin_, tokens, skips_blocks, false).backward();
    if (reduces) note_reductions();
  }

  /// The twin's gradients are those of this rank since the last reduction.
  void note_reductions() {
    const auto ranks = init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
    const auto parameters = twin_->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& gradient = parameters[i].grad();
      if (!gradient.defined()) continue;
      auto& each = reduced_[i];
      each.is_new = true;
      const auto own = gradient.to(torch::kDouble);
      const double largest = largest_on_ranks(own), error = is_coded(own) ? settings_.error() : 0;
      each.largest = std::max(each.largest, largest);
      each.size += largest;
      each.bound =
          settings_.feeds_back ? each.before + bound_of(each.largest, error, true) : each.bound + bound_of(largest, error, false);
      auto mean = own.reshape({-1}).clone();
      ranks->all_reduce(mean, ReduceOp::kAvg, "mean").wait();
      each.mean = each.mean.defined() ? each.mean + mean.view(own.sizes()) : mean.view(own.sizes());
      parameters[i].mutable_grad() = Tensor();
    }
  }

  void compare_gradients() {
    const auto parameters = net_->parameters(), twins = twin_->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto& each = reduced_[i];
      const auto& gradient = parameters[i].grad();
      ASSERT_EQ(gradient.defined(), std::exchange(each.is_new, false)) << "parameter " << i << ": whether it has a gradient";
      if (!gradient.defined()) continue;
      const auto got = full(gradient).to(torch::kDouble);
      each.got = each.got.defined() ? each.got + got : got;
      EXPECT_LE((each.got - each.mean).abs().max().item<double>(), each.bound * 1.0001 + kRounding * each.size)
          << "parameter " << i;
      if (settings_.feeds_back) continue;
      each = Reduced();
    }
  }

  Draw draw_;
  Settings settings_;
  Net net_, twin_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<Reduced> reduced_;
  bool spoils_ = false; ///< the last rank's loss is NaN, and the step is skipped
};

/// `TESSERA_TEST_FULL=1` runs all of them.
TEST(RandomTrainings, StayWithinTheirBounds) {
  std::vector<uint64_t> numbers(200);
  std::iota(numbers.begin(), numbers.end(), uint64_t{0});
  for (const auto number : sweep(numbers, 12)) {
    RandomTraining training(number);
    SCOPED_TRACE(c10::str("training ", number, ": ", training.description()));
    training.run();
    if (HasFailure()) return;
  }
}

} // namespace
} // namespace tessera::testing::random_trainings_test
