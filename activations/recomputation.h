#pragma once

// Internal: one call of `tessera::recompute`, from its first run to the backward that runs it again.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/activations/kept_decision.h>
#include <tessera/activations/kept_results.h>
#include <tessera/activations/open_runs.h>
#include <tessera/activations/recompute_options.h>
#include <tessera/activations/run_state.h>
#include <tessera/activations/saved_tensor_hooks.h>
#include <tessera/activations/version_watch.h>

namespace torch::nn {
class Module;
}

namespace tessera::internal {

/// A number of the outermost recomputation whose second run is going on here, from 1; 0: none is.
uint64_t current_recomputation();
/// Whether this thread runs a function again, and no backward inside of it.
bool in_second_run();

/// While it lives, this thread runs a function that is recomputed: for the first time, or again.
class RunScope {
 public:
  RunScope(uint64_t outermost, bool is_second_run);

 private:
  const ScopedValue<uint64_t> outermost_;
  const ScopedValue<OpenRuns::Second> second_;
};

class Recomputation : public std::enable_shared_from_this<Recomputation> {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Run = std::function<Tensors(const Tensors& inputs)>; ///< the function, to its tensors

  /// `module` is the function's, or null. A second run finds its buffers as the first one did, and leaves them as they are.
  Recomputation(RecomputeOptions options, const Tensors& inputs, const torch::nn::Module* module, Run run);

  /// While it lives, what autograd saves on this thread is left to the second run.
  class FirstRun final : public SavedTensorTaker {
   public:
    explicit FirstRun(Recomputation& recomputation);
    /// Ends the first run, after the function has returned.
    void finish(const Tensors& outputs);
    std::unique_ptr<torch::autograd::SavedVariableHooks> take() override;

   private:
    Recomputation& recomputation_;
    RunScope run_;
    TakerScope taker_;
    KeptResults::Scope results_;
    DecisionScope decisions_;
  };

  /// What a tensor is known by in both runs.
  struct Signature {
    explicit Signature(const at::Tensor& tensor);
    bool operator==(const Signature&) const = default;
    std::string to_string() const;
    std::vector<int64_t> sizes;
    std::optional<at::ScalarType> dtype; ///< none: an undefined tensor
    std::optional<c10::Device> device;
  };

  /// A tensor that autograd saved in the first run, as long as its graph lives.
  struct Slot {
    size_t number; ///< in the order of the run
    Signature signature;
    VersionWatch watch;
    at::Tensor value;                        ///< from a second run, until backward takes it
    std::optional<VersionWatch> value_watch; ///< from when autograd saved it there
    bool is_overwritten = false;             ///< it was written later in that run
    int64_t task = -1;                       ///< the backward that it is for
    int64_t taken_by = -1;                   ///< the last backward that took one
  };
  std::shared_ptr<Slot> add(const at::Tensor& saved);
  /// What the slot's tensor was. The first call of a backward runs the function again.
  at::Tensor bring_back(Slot& slot);

 private:
  class SecondRun;

  void run_again(Slot& wanted, int64_t task);
  Tensors unpack_inputs() const;
  void look_at_tensors();
  void keep_written_buffers();
  void check_unchanged() const;
  void forget(int64_t task);
  std::string describe() const;
  [[noreturn]] void fail(const std::string& how) const;

  RecomputeOptions options_;
  const uint64_t outermost_;
  const Run run_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  bool is_over_ = false;                     ///< the first run
  Tensors buffers_;                          ///< of the module; once the first run is over those that it wrote
  Tensors first_values_;                     ///< what these were before it
  Tensors unwritten_buffers_;                ///< the others
  std::vector<std::string> buffer_names_;    ///< during the first run
  std::vector<VersionWatch> buffer_watches_; ///< the same
  std::vector<std::pair<std::string, VersionWatch>>
      watched_;  ///< of the module: parameters, and buffers that it left as they were
  RngState rng_; ///< before the first run; empty once that is over, without keep_rng_state
  AutocastState autocast_;
  CarriedScopePtr scope_ = open_runs->carried; ///< of the first run
  std::optional<KeptResults> results_;
  Decisions decisions_;
  std::vector<std::weak_ptr<Slot>> slots_;
  std::vector<Signature> outputs_; ///< of a run to its end
  std::recursive_mutex mutex_; ///< two of autograd's threads may ask; a backward inside the function may ask amid a second run
};

} // namespace tessera::internal
