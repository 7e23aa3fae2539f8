// Long trainings in which forwards and backwards fail at random: the losses are those of a training without the failed ones, and
// nothing of these is left.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/training/grad_scaler.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sanitized.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::failed_steps_test {
namespace {

using torch::Tensor;

constexpr int64_t kResidentSlack = kIsSanitized ? 1 << 30 : 4 << 20;

struct UsersError : std::runtime_error {
  UsersError() : std::runtime_error("an error of the program's own") {}
};

/// Where a micro-batch ends with an exception, if it does.
enum class Where { kNowhere, kForward, kEvaluation, kBackward, kSecondRun };

struct Failure {
  Where where = Where::kNowhere;
  int64_t micro_batch = 0, block = 0;
};

/// What one step does, and where its attempts fail.
struct Step {
  explicit Step(uint64_t seed) {
    Draw draw(seed);
    micro_batches = draw.chance(30) ? 3 : 1;
    waits = micro_batches > 1 && draw.chance(60);
    recomputes = draw.chance(40);
    scales = draw.chance(25);
    clips = draw.chance(50);
    in_scope = draw.chance(20);
    autocasts = draw.chance(10);
    if (draw.chance(15)) prefetch_depth = draw.below(4);
    unshards = draw.chance(10);
    for (int64_t count = draw.chance(60) ? 1 + draw.below(2) : 0; count > 0; --count) {
      const auto where = static_cast<Where>(1 + draw.below(recomputes ? 4 : 3));
      failures.push_back({where, draw.below(micro_batches), draw.below(3)});
    }
  }
  int64_t micro_batches;
  bool waits; ///< all but the last micro-batch accumulate without communication
  bool recomputes, scales, clips, in_scope, autocasts, unshards;
  std::optional<int64_t> prefetch_depth;
  std::vector<Failure> failures;
};

class Trainer {
 public:
  explicit Trainer(const Strategy& strategy) : net_(make_net()) {
    shard_model(net_, strategy);
    optimizer_.emplace(net_->parameters(), torch::optim::AdamWOptions(1e-3));
  }

  /// The loss of a step, after the attempts that fail.
  double step(int64_t number, const Step& step, const std::vector<Failure>& failures) {
    if (step.prefetch_depth) fsdp(*net_).set_prefetch_depth(*step.prefetch_depth);
    for (const auto& failure : failures) {
      const bool in_backward = failure.where == Where::kBackward || failure.where == Where::kSecondRun;
      if (!in_backward) continue; // an attempt goes on after the others
      EXPECT_THROW(accumulate(number, step, {failure}), UsersError);
      fsdp(*net_).set_is_last_backward(true);
      optimizer_->zero_grad();
    }
    std::vector<Failure> survived;
    std::copy_if(failures.begin(), failures.end(), std::back_inserter(survived),
                 [](const Failure& failure) { return failure.where == Where::kForward || failure.where == Where::kEvaluation; });
    const double loss = accumulate(number, step, survived);
    if (step.clips) {
      if (step.scales) scaler_.unscale_(*optimizer_);
      clip_grad_norm_(*net_, 0.5);
    }
    if (step.scales) {
      scaler_.step(*optimizer_);
      scaler_.update();
    } else {
      optimizer_->step();
    }
    optimizer_->zero_grad();
    return loss;
  }

  Net& net() { return net_; }
  double scale() const { return scaler_.get_scale(); }

 private:
  double accumulate(int64_t number, const Step& step, const std::vector<Failure>& failures) {
    double total = 0;
    for (int64_t micro = 0; micro < step.micro_batches; ++micro) {
      const bool is_last = micro == step.micro_batches - 1;
      fsdp(*net_).set_is_last_backward(is_last);
      std::optional<NoSync> scope;
      if (step.waits && !is_last) scope.emplace(*net_);
      Failure in_backward;
      for (const auto& failure : failures) {
        if (failure.micro_batch != micro) continue;
        if (failure.where == Where::kBackward || failure.where == Where::kSecondRun) {
          in_backward = failure;
        } else {
          EXPECT_THROW(forward(number, micro, step, failure), UsersError);
        }
      }
      auto loss = forward(number, micro, step, in_backward);
      total += loss.item<double>();
      loss = loss / static_cast<double>(step.micro_batches);
      (step.scales ? scaler_.scale(loss) : loss).backward();
    }
    return total;
  }

  Tensor forward(int64_t number, int64_t micro, const Step& step, const Failure& failure) {
    torch::manual_seed(static_cast<uint64_t>(10 * number + micro));
    std::optional<torch::NoGradGuard> no_grad;
    if (failure.where == Where::kEvaluation) no_grad.emplace();
    std::optional<ForwardScope> scope;
    if (step.in_scope) scope.emplace(*net_);
    std::optional<AutocastScope> autocast;
    if (step.autocasts) autocast.emplace();
    if (step.unshards) fsdp(*(*net_->blocks)[1]).unshard_async();
    const auto tokens = own_batch(10 * number + micro);
    auto x = net_->embedded(tokens.slice(1, 0, -1));
    for (int64_t i = 0; i < 3; ++i) x = run_block(i, x, step, failure.block == i ? failure.where : Where::kNowhere);
    const auto logits = torch::matmul(net_->norm(x), net_->embed->weight.t()).to(torch::kFloat);
    return torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(-1)}),
                                                tokens.slice(1, 1).reshape({-1}).to(logits.device()));
  }

  Tensor run_block(int64_t index, const Tensor& x, const Step& step, Where where) {
    const auto run = [&net = net_, index, where, runs = 0](const Tensor& in) mutable {
      auto y = (*net->blocks)[static_cast<size_t>(index)]->as<Block>()->forward(in);
      if (where == Where::kForward || where == Where::kEvaluation) throw UsersError();
      if (where == Where::kSecondRun && runs++ > 0) throw UsersError();
      return torch::dropout(y, 0.1, /*train=*/true);
    };
    auto y = step.recomputes ? recompute(RecomputeOptions{.early_stop = false}, run, x) : std::decay_t<decltype(run)>(run)(x);
    if (where == Where::kBackward) y.register_hook([](const Tensor&) -> Tensor { throw UsersError(); });
    return y;
  }

  Net net_;
  std::optional<torch::optim::AdamW> optimizer_;
  GradScaler scaler_{{.init_scale = 1024, .growth_interval = 20}};
};

/// What this process has of the machine, between two steps.
struct Held {
  int64_t resident_bytes, heap_bytes, descriptors, threads;
};

int64_t status_number(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t value = 0;
    if (word == name + ":" && status >> value) return value;
  }
  return -1;
}

Held held() {
  const auto device = test_device(); // where what is under way holds memory
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  return {1024 * status_number("VmRSS"), static_cast<int64_t>(mallinfo2().uordblks),
          std::distance(begin(descriptors), end(descriptors)), status_number("Threads")};
}

/// Unsharded parameters and the memory that is kept for them.
int64_t unsharded_bytes(Trainer& trainer) {
  int64_t bytes = 0;
  for (const auto& group : fsdp(*trainer.net()).state()->subtree_groups()) bytes += group->unsharded_bytes();
  return bytes + fsdp(*trainer.net()).state()->group()->cache().cached_bytes();
}

void expect_same_shards(Trainer& a, Trainer& b) {
  const auto expected = b.net()->named_parameters();
  for (const auto& item : a.net()->named_parameters())
    EXPECT_TENSORS_EQUAL(to_local(item.value()), to_local(expected[item.key()])) << item.key();
}

struct Growth {
  Held first, last;
  int64_t first_unsharded = 0, largest_unsharded = 0;
};

/// Takes the first `again` of the steps a second time, if any: then the growth is that of these.
Growth train_with_failures(const Strategy& strategy, int64_t steps, int64_t again) {
  Trainer failing(strategy), twin(strategy);
  Growth growth{};
  const int64_t warm_up = again > 0 ? steps : steps / 3;
  for (int64_t number = 0; number < steps + again; ++number) {
    const Step step(static_cast<uint64_t>(number % steps));
    const double expected = twin.step(number, step, {}), got = failing.step(number, step, step.failures);
    EXPECT_EQ(got, expected) << "step " << number;
    EXPECT_EQ(failing.scale(), twin.scale());
    if (::testing::Test::HasFailure()) return growth;
    if (number < warm_up) {
      growth.first_unsharded = std::max(growth.first_unsharded, unsharded_bytes(failing));
      growth.first = held();
    }
    growth.largest_unsharded = std::max(growth.largest_unsharded, unsharded_bytes(failing));
  }
  growth.last = held();
  expect_same_shards(failing, twin);
  return growth;
}

TEST(FailedSteps, LeaveTheTrainingAndTheProcessAsTheyWere) {
  constexpr int64_t kStepsOfAll = 2000, kStepsOfSubset = 60;
  const int64_t steps = full_run() && tests_the_cpu() ? kStepsOfAll : kStepsOfSubset;
  // The simulated device has records of its own in the heap, of each call that is new to it.
  const int64_t again = tests_the_cpu() ? 0 : steps / 3, heap_slack = (tests_the_cpu() ? 64 : 128) << 10;
  int64_t heap_growth = 0;
  for (const auto& strategy : sweep(strategies(), 3, is_default)) {
    SCOPED_TRACE(strategy.name);
    const auto growth = train_with_failures(strategy, steps, again);
    if (HasFailure()) return;
    EXPECT_LE(growth.largest_unsharded, growth.first_unsharded);
    if (test_device_type() == at::kCUDA) continue; // it loads its kernels as they are first used
    EXPECT_LE(growth.last.resident_bytes, growth.first.resident_bytes + kResidentSlack);
    EXPECT_LE(growth.last.heap_bytes, growth.first.heap_bytes + heap_slack);
    EXPECT_EQ(growth.last.descriptors, growth.first.descriptors);
    EXPECT_EQ(growth.last.threads, growth.first.threads);
    heap_growth = std::max(heap_growth, growth.last.heap_bytes - growth.first.heap_bytes);
  }
  RecordProperty("heap_growth", std::to_string(heap_growth));
}

} // namespace
} // namespace tessera::testing::failed_steps_test
