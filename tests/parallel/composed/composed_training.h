#pragma once

// Trainings of the net on a mesh of pipelines, replicas, shards, parts of sequences, parts of layers and experts, beside those of
// one process.

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/fsdp/options.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/training/averaged_model.h>
#include <tessera/training/grad_scaler.h>

#include <tessera/tests/parallel/composed/composed_net.h>

namespace tessera::testing::composed {

/// How many ranks each dim has. `experts` of them are ranks of shard, cp and tp.
struct Shape {
  int64_t pipeline = 0; ///< 0: no pipeline
  int64_t replicas = 1, shards = 1, parts = 1, tensor = 1, experts = 1;

  int64_t ranks() const { return std::max<int64_t>(1, pipeline) * replicas * shards * parts * tensor; }
  int64_t data_ranks() const { return replicas * shards; }
  std::string text() const;
};

/// How a process computes what one rank would; none of it changes the numbers.
struct Manner {
  Shape shape;
  PipelineScheduleKind kind = PipelineScheduleKind::k1F1B;
  bool recomputes = false;
  Residency residency = Residency::kStage;
  int64_t resident_stages = 0; ///< as `PipelineOptions` has it
  std::optional<Strategy> strategy = std::nullopt;
  ContextParallel scheme = ContextParallel::kAllGather;
  PartOrder order = PartOrder::kHeadTail;
  bool in_half = false;       ///< parameters and activations in fp16
  bool gathers_codes = false; ///< of weights that multiply in fp8

  std::string text() const;
};

/// What is trained.
struct Task {
  NetOptions net;
  uint64_t seed = 3;
  bool uses_adamw = false;
  double eps = 1e-8;     ///< of AdamW
  double max_norm = 0.5; ///< 0: no clipping
  bool averages = false, scales = false;

  std::optional<double> adamw() const { return uses_adamw ? std::optional(eps) : std::nullopt; }
};

/// A step of the optimizer.
struct StepPlan {
  uint64_t seed = 0;
  int64_t micro_batches = 4;
  int64_t calls = 1;      ///< over which these are accumulated, as many in each
  bool overflows = false; ///< a gradient is infinite on some rank, so that a scaler skips the step
  int64_t nan_block = -1; ///< the block whose first input on the first data rank is NaN, which a scaler skips too
  bool evaluates = false; ///< between the calls

  bool is_skipped() const { return overflows || nan_block >= 0; }
};

/// A training, of one process or of this rank's part of one.
class Training {
 public:
  explicit Training(Task task) : task_(task) {}
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;
  virtual ~Training() = default;

  /// Appends the loss and the norm.
  virtual void step(const StepPlan& plan) = 0;
  /// Appends the loss of other micro-batches; with the averages, where these are kept.
  virtual void evaluate(uint64_t seed, int64_t micro_batches) = 0;
  /// Goes on in another manner, from a checkpoint in `folder`.
  virtual void resume(const Manner& manner, const std::filesystem::path& folder) = 0;
  /// The parameters with `part` in their names no longer train, or do again.
  virtual void freeze(const std::string& part, bool trains) = 0;
  /// Weights and their averages, whole, of what is here. Every rank calls it.
  virtual std::map<std::string, torch::Tensor> weights() = 0;

  std::vector<double> numbers;

 protected:
  const Task task_;
};

/// One process; it draws the micro-batches of the data ranks of `manner`.
std::unique_ptr<Training> make_whole(const Task& task, const Manner& manner);

/// This rank's part.
class SplitTraining final : public Training {
 public:
  SplitTraining(const Task& task, const Manner& manner);
  void step(const StepPlan& plan) override;
  void evaluate(uint64_t seed, int64_t micro_batches) override;
  void resume(const Manner& manner, const std::filesystem::path& folder) override;
  void freeze(const std::string& part, bool trains) override;
  std::map<std::string, torch::Tensor> weights() override;

  /// A step in which the block `block` throws in its forward of micro-batch `micro_batch`. Returns what the step throws here;
  /// "" where it does not. Gradients are dropped then.
  std::string fail(const StepPlan& plan, int64_t block, int64_t micro_batch = 0);
  /// The same, where its input's gradient throws.
  std::string fail_in_backward(const StepPlan& plan, int64_t block, int64_t micro_batch = 0);
  /// The same, where the last gradient of the parameter `name` throws, which a second half of a backward may have.
  std::string fail_in_gradient(const StepPlan& plan, const std::string& name);
  /// The same, of an evaluation.
  std::string fail_in_evaluation(const StepPlan& plan, int64_t block);
  /// Another schedule on the same stages, which must lie as this one's; also after a failure.
  void change_schedule(PipelineScheduleKind kind);
  const PipelineStages& stages() const { return *stages_; }
  const Pipeline& pipeline() const { return *pipeline_; }

 private:
  void make(const Manner& manner);
  void split_net();
  void shard_experts(const FullyShardOptions& options);
  void shard_net();
  void make_pipeline();
  torch::nn::Module& module() { return stages_ ? *stages_->module : static_cast<torch::nn::Module&>(*net_); }
  std::vector<Batch> batches(uint64_t seed, int64_t micro_batches);
  double count_of(const std::vector<Batch>& batches) const;
  double sum_over_data(double number) const;
  double run_loop(const std::vector<Batch>& batches, double count, bool is_last);
  void backward_all(const StepPlan& plan);
  void backward_of(const StepPlan& plan);
  std::string error_of(const std::function<void()>& step);
  std::string error_at(int64_t block, const std::function<void(const torch::Tensor& x)>& throws,
                       const std::function<void()>& step);
  StateDict state(bool saves);

  Manner manner_;
  std::vector<std::pair<std::string, bool>> frozen_; ///< as `freeze` was called
  Net net_{nullptr};
  DeviceMesh mesh_, data_; ///< all dims; those whose ranks have losses of their own
  std::optional<PipelineStages> stages_;
  std::optional<Pipeline> pipeline_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<AveragedModel> average_;
  std::optional<GradScaler> scaler_;
};

/// Runs `program` as so many ranks: as this one of them where the world has as many, or as threads of a world of one. Returns
/// false where neither is so.
bool run_as(int64_t ranks, const std::function<void()>& program);

/// All shapes of so many ranks; with experts, all numbers of ranks for these.
std::vector<Shape> shapes_of(int64_t ranks, int64_t experts);

/// Stages a rank, and whether `ranks` of a pipeline may have so many micro-batches.
int64_t chunks_of(PipelineScheduleKind kind);
bool takes(PipelineScheduleKind kind, int64_t ranks, int64_t micro_batches);

/// Fails where numbers or weights differ by more than `bound`.
void expect_same(Training& actual, const std::vector<double>& numbers, const std::map<std::string, torch::Tensor>& weights,
                 double bound);

} // namespace tessera::testing::composed
