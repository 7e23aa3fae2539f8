#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/checkpoint/saved_state.h>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace tessera {

class StateDict;

/// Entries "<prefix><parameter>.<field>", and lists of parameters: the values "<binding's prefix>parameters", and those under it
/// whose names end in ".params".
struct NamedByParameters {
  std::vector<std::string> prefixes;
  std::vector<std::string> parameters; ///< full names
};

/// Connects a state dict to an object whose entries depend on the checkpoint, for example an optimizer that has no state yet.
class StateBinding {
 public:
  virtual ~StateBinding() = default;
  /// Adds or removes entries so that they fit `saved`. The object itself is not changed yet, and `state` is a copy: it takes the
  /// place of what the load was given once all has been read.
  virtual void before_load(StateDict& state, const SavedState& saved) = 0;
  /// Called when every tensor and value of `state` has been read: hands them to the object.
  virtual void after_load(const StateDict& state) = 0;
  /// What all names of the object's entries begin with, where a load with a filter shall take all of them or none; "" otherwise.
  virtual std::string prefix() const { return ""; }
  /// The object's entries that are named after parameters. They follow `LoadOptions::rename` of these: `saved` has the names
  /// here.
  virtual NamedByParameters named_by_parameters() const { return {}; }
  /// Describes for people what a load finds an error where it differs between ranks.
  virtual std::string settings() const { return ""; }
};

/// Named tensors and values, in the order in which they were added: what a checkpoint saves and loads.
///
/// Tensors are held by reference: a load writes into the caller's memory. A DTensor stands for its global tensor, and each rank
/// saves and loads its own part. Copies share the tensors.
///
/// A reference to an entry, or to what it holds, is valid until an entry is added or erased, and until a load where there are
/// bindings (an optimizer's, for example).
class StateDict {
 public:
  struct Entry {
    std::string name;
    std::variant<at::Tensor, StateValue> content;
    std::vector<std::string> aliases; ///< further names of the same tensor (tied parameters)

    bool is_tensor() const { return content.index() == 0; }
  };

  /// Adds a tensor (plain or DTensor). An error when `name` or an alias is taken, is empty, or the tensor is undefined; nothing
  /// is added then.
  void add(const std::string& name, at::Tensor tensor, std::vector<std::string> aliases = {});
  /// Adds or replaces a value.
  void set(const std::string& name, StateValue value);
  template <std::integral T>
  void set(const std::string& name, T value) {
    if constexpr (std::same_as<T, bool>) {
      set(name, StateValue(value));
    } else {
      set(name, StateValue(static_cast<int64_t>(value)));
    }
  }
  void set(const std::string& name, const char* value) { set(name, StateValue(std::string(value))); }

  /// True for the name of an entry, or an alias of one.
  bool contains(const std::string& name) const { return index_.count(name) > 0; }
  /// The tensor with this name or alias; an error when there is none.
  const at::Tensor& tensor(const std::string& name) const&;
  at::Tensor tensor(const std::string& name) && { return std::as_const(*this).tensor(name); }
  /// The value with this name; an error when there is none or it is of another type than `T`, one of a StateValue's.
  template <typename T>
  const T& value(const std::string& name) const& {
    static_assert(IsStateValue<T>::value, "a value is a bool, int64_t, double, std::string or a vector of one of the last three");
    const auto* found = std::get_if<T>(&value(name));
    if (!found) throw_wrong_type(name);
    return *found;
  }
  template <typename T>
  T value(const std::string& name) && {
    return std::as_const(*this).template value<T>(name);
  }
  const StateValue& value(const std::string& name) const&;
  StateValue value(const std::string& name) && { return std::as_const(*this).value(name); }

  const std::vector<Entry>& entries() const& { return entries_; }
  /// They end with the state dict: `for (auto& entry : state_dict(module).entries())` would read freed memory.
  const std::vector<Entry>& entries() const&& = delete;
  size_t size() const { return entries_.size(); }
  void erase(const std::string& name);
  /// Erases all entries for which it is true, in one pass.
  void erase_if(const std::function<bool(const Entry&)>& predicate);

  /// A submodule of the module whose state this is, with its full name. It is no entry. `save_torch` writes it, though nothing in
  /// it has one (a ReLU), because torch::load asks for it.
  void add_submodule(const std::string& name);
  const std::vector<std::string>& submodules() const { return submodules_; }

  /// Adds the entries, submodules and bindings of `other`; an error when a name appears in both, unless for the same value;
  /// nothing is added then.
  void merge(const StateDict& other);
  void bind(std::shared_ptr<StateBinding> binding) { bindings_.push_back(std::move(binding)); }
  const std::vector<std::shared_ptr<StateBinding>>& bindings() const { return bindings_; }

 private:
  const Entry& entry(const std::string& name) const;
  [[noreturn]] void throw_wrong_type(const std::string& name) const;
  void check_names(const Entry& entry) const; ///< before it is added
  void insert(Entry entry);
  void append(Entry entry);
  void index_entry(const Entry& entry, size_t position);

  std::vector<Entry> entries_;
  std::unordered_map<std::string, size_t> index_; // names and aliases → position in entries_
  std::vector<std::string> submodules_;
  std::vector<std::shared_ptr<StateBinding>> bindings_;
};

/// What `state_dict` puts into a state dict, and what `load_state_dict` asks of one; the names are those of PyTorch's
/// StateDictOptions.
struct StateDictOptions {
  /// Whole plain tensors in the place of DTensors, on every rank.
  bool full_state_dict = false;
  /// Copies in the host's memory.
  bool cpu_offload = false;
  /// Gives ranks other than 0 an empty state dict, with `full_state_dict`. PyTorch does so where both options above are set; here
  /// they alone leave every rank its copy, so that a host needs memory for one of each of its ranks.
  bool rank0_only = false;
  /// Leave out parameters that do not require grad.
  bool ignore_frozen_params = false;
  /// Options of the optimizer under "optimizer.param_groups.<parameter>.lr" and so on, for each parameter by itself, instead of
  /// under the group's number: such a state fits an optimizer with other groups.
  bool flatten_optimizer_state_dict = false;
  /// Accept parameters that train and that nothing sharded or replicated, beside others that are: each rank trains its own copy
  /// of them. Otherwise they are an error, since mostly a `fully_shard` of the root was forgotten.
  bool allow_unsharded_params = false;
  /// Makes a name that only one side has an error in `load_state_dict`.
  bool strict = true;
  /// For `load_state_dict`: the state is rank 0's, whole; the other ranks' is not looked at.
  bool broadcast_from_rank0 = false;
  /// Converts in `load_state_dict` to the dtype of the target's tensors, instead of an error where the source's differ. (PyTorch
  /// always converts.)
  bool cast = false;
  /// Begins every name of a parameter or buffer, as "stage1.": for modules that ranks name alike, such as the stages of a
  /// pipeline. The optimizer's options are then under the parameters' names, as with `flatten_optimizer_state_dict`, so that the
  /// states of several stages are one: merged on one rank, or saved by several.
  std::string prefix;
};

/// The parameters and buffers of `module` under their full names (`named_parameters`, `named_buffers`). A tied parameter is one
/// entry with aliases.
///
/// The tensors are the module's own, so that a load reaches it. With `full_state_dict` or `cpu_offload` they are copies, which
/// `load_state_dict` brings back. Every rank calls it when `full_state_dict` is set, since tensors are gathered, one at a time;
/// otherwise it is local. Semantics: PyTorch's get_model_state_dict.
StateDict state_dict(const torch::nn::Module& module, const StateDictOptions& options = {});

/// The same with the state of `optimizer`, keyed by full parameter names:
///   "optimizer.state.<parameter>.exp_avg", "….step" and so on, as in torch.optim;
///   "optimizer.param_groups.<i>.lr", "….betas", …, "….params" (names), or with `flatten_optimizer_state_dict`
///   "optimizer.param_groups.<parameter>.lr", …;
///   "optimizer.type".
/// For LibTorch's optimizers, and for classes that `register_optimizer` describes; any other optimizer is an error. Every
/// parameter of the optimizer must be one of the module's. Loading takes either form of the options. It creates optimizer state
/// that does not exist yet (in the dtype of the parameter here, if it was saved in its parameter's dtype), and drops the
/// state of a parameter that had none yet in the optimizer that was saved. A parameter that this one did not have is reported as
/// missing, and keeps its state. The module and the optimizer must outlive the state dict.
///
/// Make the state dict anew for each save (docs/checkpoints.md, "Save and resume").
///
/// The state of LBFGS is one of all parameters together, under the name of the first one, with "optimizer.parameters" for their
/// order: a load into another order is an error. An std::optional option, such as its max_eval, is a list of none or one.
StateDict state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer, const StateDictOptions& options = {});

/// An optimizer and the name that tells its entries from those of others.
struct NamedOptimizer {
  std::string name;
  torch::optim::Optimizer& optimizer;
};

/// The same with several optimizers, each over parameters of its own:
///   state_dict(*model, {{"muon", muon}, {"adamw", adamw}})
/// The entries of each are under its name: "optimizer.muon.type", "optimizer.muon.state.<parameter>.momentum" and so on. The
/// state dicts of two modules that are trained in turns merge into one when the modules have prefixes and the optimizers have
/// names.
///
/// Errors: a parameter that two of them hold; a name that appears twice, is empty, holds a dot, or is "type", "state",
/// "param_groups" or "parameters".
StateDict state_dict(const torch::nn::Module& module, c10::ArrayRef<NamedOptimizer> optimizers,
                     const StateDictOptions& options = {});

/// Names that only one side had.
struct IncompatibleKeys {
  std::vector<std::string> missing_keys;    ///< of the target, not in the source
  std::vector<std::string> unexpected_keys; ///< of the source, not in the target
};

/// Copies the tensors and values of `source` into those of `target` with the same name or alias, in place: the load of a state
/// that is in memory. Of the options `strict`, `broadcast_from_rank0` and `cast` count.
///
/// Tensors of `source` may be whole or DTensors of any placement; each rank copies the part that its target holds. Of a whole
/// tensor for a DTensor every rank has the same values: each reads it once for a checksum, and those that differ are an error.
/// (PyTorch's full_state_dict takes rank 0's without a word.) With `broadcast_from_rank0` they must be whole, rank 0's travel one
/// at a time, and nothing is compared. Every rank calls it, with the same target names. Names, shapes, dtypes and these values
/// are compared on all ranks before anything is written; an error on any rank is an error on every rank, and lists all that is
/// missing, unexpected or different. Semantics: PyTorch's set_state_dict.
IncompatibleKeys load_state_dict(StateDict& target, const StateDict& source, const StateDictOptions& options = {});

/// Loads into a module, and an optimizer or several. `ignore_frozen_params` leaves out frozen parameters, as in `state_dict`.
IncompatibleKeys load_state_dict(torch::nn::Module& module, const StateDict& source, const StateDictOptions& options = {});
IncompatibleKeys load_state_dict(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const StateDict& source,
                                 const StateDictOptions& options = {});
IncompatibleKeys load_state_dict(torch::nn::Module& module, c10::ArrayRef<NamedOptimizer> optimizers, const StateDict& source,
                                 const StateDictOptions& options = {});

} // namespace tessera
