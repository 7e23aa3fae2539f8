#pragma once

#include <tessera/mixed_precision/policy.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tessera::testing::scripts {

/// Whether an entry of `keep_in_fp32` names the parameter: a type of a module that holds it, or the last parts of its path. Only
/// entries of which it does not matter where a group's paths begin.
bool is_kept(const torch::nn::Module& model, const std::string& name, const std::vector<std::string>& entries);

/// What docs/mixed_precision.md says of a policy, for an unsharded model that stands for the models of several ranks: each of
/// them reads the parameters in the policy's dtypes, has gradients of its own in these, and their mean is taken as a reduction
/// takes it. Nothing of it is the library's.
class EmulatedPolicy {
 public:
  EmulatedPolicy(MixedPrecisionPolicy policy, int64_t ranks);
  ~EmulatedPolicy();
  EmulatedPolicy(const EmulatedPolicy&) = delete;
  EmulatedPolicy& operator=(const EmulatedPolicy&) = delete;

  /// While it lives, what the thread's operators read of `model`'s parameters is what `rank` would read.
  class Scope {
   public:
    Scope(EmulatedPolicy& policy, const torch::nn::Module& model, int64_t rank);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    /// What stands for `tensor`, where that is a parameter; undefined for any other.
    torch::Tensor read(const torch::Tensor& tensor) const;
    /// Whether `tensor` is what stands for a parameter, or a view of it.
    bool is_read(const torch::Tensor& tensor) const;
    /// Not in a backward that began in it.
    bool is_in_forward() const;
    bool casts_activations() const { return policy_.policy_.param_dtype && policy_.policy_.cast_forward_inputs; }

   private:
    EmulatedPolicy& policy_;
    int64_t rank_;
    Scope* outer_;
    int64_t task_;      ///< the backward that it is in, as in a hook, or -1
    bool caches_casts_; ///< autocast, outside of it
    c10::impl::IncludeDispatchKeyGuard mode_;
  };

  /// The mean of the ranks' losses. The gradient of each of them is that of the mean: each rank has a backward of its own.
  static torch::Tensor mean(const std::vector<torch::Tensor>& losses);
  /// Gives all that was read the values that the parameters have now, as a backward reads them. Forwards do so by themselves.
  static void refresh_all();

  /// The sides have the same parameters and gradients now.
  void begin();
  /// How large the ranks' gradients of `parameter` were since then, before they were added: the mean of their absolute values, of
  /// all backwards, at the largest element. Unset where parameters have changed in between, so that what was read may differ.
  std::optional<double> size_of_gradients(const torch::Tensor& parameter) const;

 private:
  /// A parameter as the ranks read it.
  struct Reading {
    torch::Tensor parameter;
    torch::Tensor start;                ///< its values at `begin`
    torch::Tensor size;                 ///< a number, of its gradients since then
    std::vector<torch::Tensor> values;  ///< one a rank
    std::vector<torch::Tensor> tracked; ///< of the same memory, in the graph of the parameter; empty while it is frozen
  };

  void note_parameters(const torch::nn::Module& model);
  void track(Reading& reading) const;
  void refresh();

  MixedPrecisionPolicy policy_;
  int64_t ranks_;
  bool has_moved_ = false; ///< some parameter that was read has changed since `begin`
  std::unordered_map<const c10::TensorImpl*, Reading> readings_;
  std::unordered_set<const c10::StorageImpl*> storages_; ///< of their values
};

} // namespace tessera::testing::scripts
