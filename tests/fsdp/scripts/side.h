#pragma once

#include <tessera/checkpoint/state_dict.h>
#include <tessera/dtensor/api.h>
#include <tessera/training/averaged_model.h>
#include <tessera/training/lr_schedule.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/tests/fsdp/scripts/emulated_policy.h>
#include <tessera/tests/fsdp/scripts/program_streams.h>
#include <tessera/tests/fsdp/scripts/random_model.h>
#include <tessera/tests/fsdp/scripts/random_optimizer.h>
#include <tessera/tests/fsdp/scripts/random_sharding.h>
#include <tessera/tests/support/test_device.h>

namespace tessera::testing::scripts {

/// A copy of what a model, and maybe its optimizer, held.
struct Snapshot {
  StateDict state;
  bool has_optimizer;
  std::string optimizer_name; ///< empty: without one
  StateDictOptions options;   ///< of its load
};

/// A model in training.
struct Trainee {
  /// Notes how its model was sharded.
  void take(const Sharding& sharding);
  /// Gives hooks, snapshots and gradients up.
  void forget_state();
  /// Gives up what belongs to the optimizer as it was: snapshots of it, and its schedule.
  void forget_optimizer();

  std::function<std::shared_ptr<RandomModel>()> build; ///< a new model with the initial weights, not sharded
  std::shared_ptr<RandomModel> model;
  std::function<Sharding(RandomModel&)> shard; ///< on the sharded side, as the model was
  OptimizerPlan plan;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> several; ///< once an action has made them: each has a part
  std::vector<std::pair<Tensor, unsigned>> hooks;
  std::vector<Snapshot> snapshots;
  std::function<std::unique_ptr<AveragedModel>(const RandomModel&)> make_average; ///< once an action has chosen one
  std::unique_ptr<AveragedModel> average;
  std::function<std::unique_ptr<LRSchedule>(torch::optim::Optimizer&)> make_schedule; ///< once an action has chosen one
  std::unique_ptr<LRSchedule> schedule;
  std::optional<MixedPrecisionPolicy> policy; ///< that the unsharded side emulates
  std::shared_ptr<EmulatedPolicy> emulation;  ///< on the unsharded side
  bool computes_in_float = false;
  bool is_exact = true;         ///< nothing was computed in less than double
  bool writes_views = true;     ///< or parts of parameters; otherwise groups may have gather extensions, which cannot follow
  bool is_replica = false;      ///< the sharded one is replicated by one call, so that ranks may use different parameters of it
  bool on_one_mesh = true;      ///< all of the sharded one's parameters, and on one device
  bool ignores = false;         ///< the sharded one has parameters whose gradients the program reduces
  bool is_last_backward = true; ///< otherwise reductions of the sharded one may go on after a backward
  bool gradients_wait = false;  ///< gradients that have not been reduced may not be in grad() yet
};

/// A number that the two sides must agree on.
struct Recorded {
  double value;
  bool is_mean;        ///< of the ranks' values on the sharded side
  double rounding = 0; ///< by how much it may differ anyway
  std::string what;    ///< for the report; empty: the number tells enough
};

class Experts;          // actions/experts.cpp
class ParallelTraining; // actions/parallel.cpp

/// What a script runs on, twice: two models, sharded or not.
class Side {
 public:
  Side(bool is_sharded, std::filesystem::path folder) : sharded(is_sharded), folder(std::move(folder)) {}

  /// Where the models compute: the unsharded ones on the CPU.
  c10::Device device() const { return sharded ? test_device() : c10::Device(c10::kCPU); }
  /// This rank's rows of a batch, of which rank r has `rows_of_ranks[r]`; all of them on the unsharded side.
  Tensor part(const Tensor& batch, const std::vector<int64_t>& rows_of_ranks) const;
  /// The same, of the rank that an unsharded side stands for.
  Tensor part(const Tensor& batch, const std::vector<int64_t>& rows_of_ranks, std::optional<int64_t> rank) const;
  /// Records a loss: on the sharded side the ranks' mean counts.
  void record_mean(const Tensor& loss) {
    recorded.push_back({loss.detach().item<double>(), true, loss.requires_grad() ? 0 : rounding_in_evaluation});
  }
  /// Records the sum of a tensor that is the same on all ranks, plain or a DTensor. Every rank calls it.
  void record(const Tensor& tensor);

  const bool sharded;
  const std::filesystem::path folder; ///< for checkpoints; the same on all ranks
  ProgramStreams streams;             ///< on which the actions run
  std::vector<Trainee> trainees;
  std::shared_ptr<Experts> experts;           ///< beside them, once an action has made it
  std::shared_ptr<ParallelTraining> parallel; ///< the same
  std::vector<Recorded> recorded;             ///< by the action that runs
  /// Without grad mode, what is computed from parameters alone is computed in the dtype of the shards.
  double rounding_in_evaluation = 0;
  int forwards = 0; ///< of the action that runs
  /// How far the action that runs takes two unsharded models apart that are a few roundings apart, where it asked for that.
  double parting = 0;
  std::vector<std::string> notes; ///< what that action did, for the report of a failure
};

/// One use of an action on one side. What is drawn is the same on both sides.
struct Turn {
  void note(const std::string& text) const { side.notes.push_back(text); }

  Side& side;
  Trainee& trainee; ///< whose turn it is
  Trainee& other;
  Draw& draw;
  int depth = 0; ///< 1 and more: within another action
};

/// Random values of the shape and dtype of `like`, whole on every rank, on its device.
Tensor random_values(const Tensor& like, Draw& draw);
/// `values` laid out as `like`, where that is a DTensor.
Tensor laid_out_as(const Tensor& values, const Tensor& like);
/// Whether all are on one device, and none or all of them on one mesh.
bool lie_on_one_mesh(const std::vector<Tensor>& tensors);
/// The whole tensor, plain and detached. Every rank calls it.
Tensor whole(const Tensor& tensor);

} // namespace tessera::testing::scripts
