// Pipelines over fully_shard, by hand: each stage is a model of its own, and one scope says what each action of a schedule is.
#include <gtest/gtest.h>

#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/micro_batch.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/optim/grad_norm.h>
#include <tessera/parallel/pipeline_schedule.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::phases_test {
namespace {

using torch::Tensor;

constexpr int64_t kVocabulary = 23, kWidth = 10, kBlocks = 8, kSteps = 3;

/// What a weight gradient is made of, later than those of the inputs.
struct Deferred {
  Tensor weight, input, gradient;
};

/// One backward of them all: autograd's accumulators take them, with the hooks of the parameters.
void run(const std::vector<Deferred>& all) {
  torch::autograd::edge_list accumulators;
  torch::autograd::variable_list gradients;
  for (const auto& each : all) {
    const auto rows = each.gradient.reshape({-1, each.gradient.size(-1)}),
               columns = each.input.reshape({-1, each.input.size(-1)});
    accumulators.emplace_back(torch::autograd::impl::grad_accumulator(each.weight), 0);
    gradients.push_back(rows.t().mm(columns));
  }
  torch::autograd::Engine::get_default_engine().execute(accumulators, gradients, /*keep_graph=*/false, /*create_graph=*/false,
                                                        /*accumulate_grad=*/true);
}

/// Where the forward that runs leaves them; null for none.
std::vector<Deferred>* deferred = nullptr;

/// `x` times the weight. Its weight gradient is left to `deferred` if there is one.
Tensor product(const Tensor& x, const Tensor& weight) {
  if (!deferred) return at::linear(x, weight);
  auto y = at::linear(x, weight.detach());
  y.register_hook([queue = deferred, weight, x = x.detach()](const Tensor& gradient) {
    queue->push_back({weight, x, gradient.detach()});
  });
  return y;
}

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        up(register_module("up", torch::nn::Linear(kWidth, 2 * kWidth))),
        down(register_module("down", torch::nn::Linear(2 * kWidth, kWidth))) {}
  Tensor forward(const Tensor& x) {
    return x + product(torch::gelu(product(norm(x), up->weight) + up->bias), down->weight) + down->bias;
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

/// Blocks `first` to `end` of the model; before the first of all there is an embedding, behind the last a head.
struct StageImpl : torch::nn::Module {
  StageImpl(int64_t first, int64_t end) : has_embedding(first == 0), has_head(end == kBlocks) {
    const auto seeded = [](int64_t seed, const auto& make) {
      torch::manual_seed(static_cast<uint64_t>(seed));
      return make();
    };
    if (has_embedding) embed = register_module("embed", seeded(100, [] { return torch::nn::Embedding(kVocabulary, kWidth); }));
    for (int64_t i = first; i < end; ++i)
      blocks.emplace_back(register_module("block" + std::to_string(i), seeded(i, [] { return Block(); })));
    if (has_head) head = register_module("head", seeded(200, [] { return torch::nn::Linear(kWidth, kVocabulary); }));
    to(torch::kDouble);
  }
  Tensor forward(Tensor x) {
    if (has_embedding) x = embed(x);
    for (auto& block : blocks) x = block->forward(x);
    return has_head ? product(x, head->weight) + head->bias : x;
  }
  bool has_embedding, has_head;
  torch::nn::Embedding embed = nullptr;
  std::vector<Block> blocks;
  torch::nn::Linear head = nullptr;
};

/// Rows of a replica's micro-batch.
Tensor tokens_of(int64_t step, int64_t replica, int64_t micro_batch) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 * step + 100 * replica + micro_batch));
  return torch::randint(0, kVocabulary, {2, 6}, generator, torch::kLong);
}

Tensor loss_of(const Tensor& logits, const Tensor& tokens) {
  return torch::nn::functional::cross_entropy(logits.reshape({-1, kVocabulary}), tokens.slice(1, 1).reshape({-1}));
}

/// One process with the whole model.
struct Whole {
  double step(int64_t number, int64_t replicas, int64_t micro_batches) {
    double sum = 0;
    for (int64_t replica = 0; replica < replicas; ++replica) {
      for (int64_t i = 0; i < micro_batches; ++i) {
        const auto tokens = tokens_of(number, replica, i);
        const auto loss = loss_of(model->forward(tokens.slice(1, 0, -1)), tokens) / (micro_batches * replicas);
        loss.backward();
        sum += loss.item<double>();
      }
    }
    clip_grad_norm_(model->parameters(), 0.1);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.5);
    model->zero_grad();
    return sum;
  }
  std::shared_ptr<StageImpl> model = std::make_shared<StageImpl>(0, kBlocks);
};

/// A stage, and what of its micro-batches is in flight.
struct Running {
  std::shared_ptr<StageImpl> module; ///< null for one of another rank
  int64_t groups = 0;
  std::vector<Tensor> inputs, outputs;
  std::vector<std::vector<Deferred>> weights;
  int64_t left = 0; ///< phases of the step
};

struct Counts {
  int64_t gathers = 0, reductions = 0;
  friend bool operator==(const Counts&, const Counts&) = default;
};
Counts operator-(const Counts& a, const Counts& b) { return {a.gathers - b.gathers, a.reductions - b.reductions}; }
Counts counts() {
  return {process_context().count(CollectiveKind::kAllGather).calls,
          process_context().count(CollectiveKind::kReduceScatter).calls};
}

MicroBatchPhase phase_of(PipelineWork work) {
  switch (work) {
    case PipelineWork::kBackward: return MicroBatchPhase::kBackward;
    case PipelineWork::kInputGradients: return MicroBatchPhase::kInputGradients;
    case PipelineWork::kWeightGradients: return MicroBatchPhase::kWeightGradients;
    default: return MicroBatchPhase::kForward;
  }
}

class Pipeline {
 public:
  Pipeline(DeviceMesh mesh, PipelineSchedule schedule, Residency residency)
      : mesh_(std::move(mesh)),
        schedule_(std::move(schedule)),
        residency_(residency),
        rank_(mesh_.local_rank(0)),
        forward_(mesh_.communicator(0, "activations")),
        backward_(mesh_.communicator(0, "gradients")),
        sums_(mesh_.communicator(0, "sums")),
        running_(static_cast<size_t>(schedule_.stages())) {
    for (int64_t stage = 0; stage < schedule_.stages(); ++stage) {
      if (schedule_.rank_of_stage[static_cast<size_t>(stage)] != rank_) continue;
      auto& mine = running_[static_cast<size_t>(stage)];
      mine.module = std::make_shared<StageImpl>(kBlocks * stage / schedule_.stages(), kBlocks * (stage + 1) / schedule_.stages());
      for (auto& block : mine.module->blocks) fully_shard(*block, mesh_["dp"]);
      fully_shard(*mine.module, mesh_["dp"]);
      mine.groups =
          static_cast<int64_t>(mine.module->blocks.size()) + (mine.module->has_embedding || mine.module->has_head ? 1 : 0);
    }
  }

  /// Returns the loss, over all ranks.
  double step(int64_t number) {
    const auto count = static_cast<size_t>(schedule_.micro_batches);
    step_ = number;
    loss_ = 0;
    const auto& actions = schedule_.actions[static_cast<size_t>(rank_)];
    for (auto& each : running_) {
      each.inputs.assign(count, {});
      each.outputs.assign(count, {});
      each.weights.assign(count, {});
      each.left = 0;
    }
    for (const auto& action : actions) ++running_of(action).left;
    for (const auto& action : actions) run(action);
    for (auto& [work, tensor] : sends_) work.wait();
    sends_.clear();
    return sum_over_all(loss_) / static_cast<double>(mesh_.size(1));
  }

  /// Clips over all stages, and updates.
  void update() {
    std::vector<Tensor> all;
    for (const auto& each : running_) {
      if (!each.module) continue;
      for (auto& parameter : each.module->parameters()) all.push_back(parameter);
    }
    std::vector<Tensor> gradients;
    for (const auto& parameter : all) gradients.push_back(parameter.grad());
    auto square = get_total_norm(gradients).square().reshape({1});
    sums_->all_reduce(square, ReduceOp::kSum, "norm").wait();
    clip_grads_with_norm_(all, 0.1, square.sqrt()[0]);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : all) {
      parameter.sub_(parameter.grad(), 0.5);
      parameter.mutable_grad().reset();
    }
  }

  /// Of this rank's stages' parameters, from those of the whole model.
  double largest_difference(const torch::nn::Module& whole) const {
    double difference = 0;
    const auto expected = whole.named_parameters();
    for (const auto& each : running_) {
      if (!each.module) continue;
      for (const auto& item : each.module->named_parameters()) {
        const torch::NoGradGuard no_grad;
        const auto got = DTensor(item.value()).full_tensor();
        difference = std::max(difference, (got - expected[item.key()]).abs().max().item<double>());
      }
    }
    return difference;
  }

  int64_t groups() const {
    int64_t sum = 0;
    for (const auto& each : running_) sum += each.groups;
    return sum;
  }
  Counts in_weight_gradients() const { return in_weight_gradients_; }

 private:
  Running& running_of(const PipelineAction& action) { return running_[static_cast<size_t>(action.stage)]; }
  int rank_of(int64_t stage) const { return static_cast<int>(schedule_.rank_of_stage[static_cast<size_t>(stage)]); }
  double sum_over_all(double value) const {
    auto sum = torch::full({1}, value, torch::kDouble);
    sums_->all_reduce(sum, ReduceOp::kSum, "loss").wait();
    if (mesh_.size(1) > 1) mesh_.communicator(1, "sums")->all_reduce(sum, ReduceOp::kSum, "loss").wait();
    return sum.item<double>();
  }

  void run(const PipelineAction& action) {
    auto& stage = running_of(action);
    const auto index = static_cast<size_t>(action.micro_batch);
    const auto phase = phase_of(action.work);
    const auto scope = micro_batch_scope(
        *stage.module, {.index = action.micro_batch, .phase = phase, .is_last = --stage.left == 0, .residency = residency_});
    switch (phase) {
      case MicroBatchPhase::kForward: return forward(stage, action);
      case MicroBatchPhase::kWeightGradients: {
        const auto before = counts();
        phases_test::run(std::exchange(stage.weights[index], {}));
        const auto now = counts() - before;
        in_weight_gradients_.gathers += now.gathers;
        in_weight_gradients_.reductions += now.reductions;
        return;
      }
      default: return backward(stage, action);
    }
  }

  void forward(Running& stage, const PipelineAction& action) {
    const auto index = static_cast<size_t>(action.micro_batch);
    const auto tokens = tokens_of(step_, mesh_.local_rank(1), action.micro_batch);
    Tensor x = tokens.slice(1, 0, -1);
    if (!stage.module->has_embedding) {
      x = take(*forward_, torch::empty({2, 5, kWidth}, torch::kDouble), action.stage - 1, action);
      x.requires_grad_();
    }
    deferred = schedule_.splits_backward() ? &stage.weights[index] : nullptr;
    auto out = stage.module->forward(x);
    deferred = nullptr;
    if (stage.module->has_head) {
      out = loss_of(out, tokens) / schedule_.micro_batches;
      loss_ += out.item<double>();
    } else {
      give(*forward_, out.detach(), action.stage + 1, action);
    }
    stage.inputs[index] = x;
    stage.outputs[index] = out;
  }

  void backward(Running& stage, const PipelineAction& action) {
    const auto index = static_cast<size_t>(action.micro_batch);
    auto out = std::exchange(stage.outputs[index], {}), x = std::exchange(stage.inputs[index], {});
    Tensor gradient;
    if (!stage.module->has_head) gradient = take(*backward_, torch::empty_like(out), action.stage + 1, action);
    torch::autograd::backward({out}, {gradient});
    if (!stage.module->has_embedding) give(*backward_, x.grad(), action.stage - 1, action);
  }

  // A stage beside this one may be on this rank, where there is one rank.
  Tensor take(Communicator& communicator, Tensor into, int64_t stage, const PipelineAction& action) {
    if (rank_of(stage) == rank_) return std::exchange(kept_[&communicator][action.micro_batch], {});
    communicator.receive(into, rank_of(stage), label(action)).wait();
    return into;
  }
  void give(Communicator& communicator, const Tensor& tensor, int64_t stage, const PipelineAction& action) {
    if (rank_of(stage) == rank_) return void(kept_[&communicator][action.micro_batch] = tensor.clone());
    auto sent = tensor.contiguous();
    auto work = communicator.send(sent, rank_of(stage), label(action));
    sends_.emplace_back(std::move(work), std::move(sent));
  }
  static std::string label(const PipelineAction& action) { return "micro-batch " + std::to_string(action.micro_batch); }

  DeviceMesh mesh_;
  PipelineSchedule schedule_;
  Residency residency_;
  int64_t rank_, step_ = 0;
  CommunicatorPtr forward_, backward_, sums_;
  std::vector<Running> running_; // by stage; empty for those of other ranks
  std::map<Communicator*, std::map<int64_t, Tensor>> kept_;
  std::vector<std::pair<Work, Tensor>> sends_;
  double loss_ = 0;
  Counts in_weight_gradients_;
};

struct Case {
  PipelineScheduleKind kind;
  int64_t chunks = 1;
};

TEST(PipelinePhases, ComputeWhatOneProcessDoesWithOneReductionAGroup) {
  using enum PipelineScheduleKind;
  const std::vector<Case> cases{{kGPipe},         {k1F1B}, {kZeroBubbleH1}, {kInterleaved1F1B, 2}, {kInterleavedZeroBubble, 2},
                                {kZeroBubbleV, 2}};
  for (int64_t stages = 1; stages <= world_size(); ++stages) {
    if (world_size() % stages != 0) continue;
    const auto replicas = world_size() / stages;
    const auto mesh = init_device_mesh(at::kCPU, {stages, replicas}, {"pp", "dp"});
    for (const auto& [kind, chunks] : sweep(cases, 3)) {
      const int64_t micro_batches = std::max<int64_t>(4, 2 * stages);
      const auto schedule = pipeline_schedule(kind, {.ranks = stages, .micro_batches = micro_batches, .chunks = chunks});
      for (const auto residency : {Residency::kStage, Residency::kMicroBatch}) {
        SCOPED_TRACE(schedule.name + ", pp " + std::to_string(stages) + ", dp " + std::to_string(replicas) +
                     (residency == Residency::kStage ? ", stage" : ", micro-batch"));
        Pipeline pipeline(mesh, schedule, residency);
        Whole whole;
        for (int64_t step = 0; step < kSteps; ++step) {
          const auto before = counts();
          const auto loss = pipeline.step(step);
          const int64_t gathers = residency == Residency::kStage ? 1 : 2 * micro_batches; // of F, and of B or I
          const Counts expected{gathers * pipeline.groups(), pipeline.groups()};
          EXPECT_EQ(counts() - before, replicas == 1 ? Counts{} : expected);
          EXPECT_NEAR(loss, whole.step(step, replicas, micro_batches), 1e-12);
          pipeline.update();
        }
        EXPECT_EQ(pipeline.in_weight_gradients().gathers, 0);
        EXPECT_LE(pipeline.largest_difference(*whole.model), 1e-12);
      }
    }
  }
}

} // namespace
} // namespace tessera::testing::phases_test
