#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// A value of a state dict that is no tensor: a step, a learning rate, a list of names.
using StateValue =
    std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>, std::vector<std::string>>;

/// What a checkpoint holds, by name.
struct SavedState {
  struct Tensor {
    at::ScalarType dtype;
    std::vector<int64_t> sizes; ///< global shape
  };
  std::map<std::string, Tensor> tensors;
  std::map<std::string, StateValue> values;
};

class StateDict;

/// Connects a state dict to an object whose entries depend on the checkpoint, for example an optimizer that has no state yet.
class StateBinding {
 public:
  virtual ~StateBinding() = default;
  /// Adds or removes entries so that they fit `saved`. The object itself is not changed yet.
  virtual void before_load(StateDict& state, const SavedState& saved) = 0;
  /// Called when every tensor and value of `state` has been read: hands them to the object.
  virtual void after_load(const StateDict& state) = 0;
};

/// Named tensors and values, in the order in which they were added: what a checkpoint saves and loads.
///
/// Tensors are held by reference: a load writes into the caller's memory. A DTensor stands for its global tensor, and each rank
/// saves and loads its own part. Copies share the tensors.
class StateDict {
 public:
  struct Entry {
    std::string name;
    std::variant<at::Tensor, StateValue> content;
    std::vector<std::string> aliases; ///< further names of the same tensor (tied parameters)

    bool is_tensor() const { return content.index() == 0; }
  };

  /// Adds a tensor (plain or DTensor). An error when `name` or an alias is taken, is empty, or the tensor is undefined.
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
  const at::Tensor& tensor(const std::string& name) const;
  /// The value with this name; an error when there is none or it is of another type.
  template <typename T>
  const T& value(const std::string& name) const {
    const auto* found = std::get_if<T>(&value(name));
    if (!found) throw_wrong_type(name);
    return *found;
  }
  const StateValue& value(const std::string& name) const;

  const std::vector<Entry>& entries() const { return entries_; }
  size_t size() const { return entries_.size(); }
  void erase(const std::string& name);

  /// Adds the entries and bindings of `other`; an error when a name appears in both.
  void merge(const StateDict& other);
  void bind(std::shared_ptr<StateBinding> binding) { bindings_.push_back(std::move(binding)); }
  const std::vector<std::shared_ptr<StateBinding>>& bindings() const { return bindings_; }

 private:
  const Entry& entry(const std::string& name) const;
  [[noreturn]] static void throw_wrong_type(const std::string& name);
  void insert(Entry entry);

  std::vector<Entry> entries_;
  std::unordered_map<std::string, size_t> index_; // names and aliases → position in entries_
  std::vector<std::shared_ptr<StateBinding>> bindings_;
};

/// The parameters and buffers of `module` under their full names (`named_parameters`, `named_buffers`). A tied parameter is one
/// entry with aliases. Local.
StateDict state_dict(const torch::nn::Module& module);

/// The same with the state of `optimizer`, keyed by full parameter names:
///   "optimizer.state.<parameter>.exp_avg", "….step" and so on, as in torch.optim;
///   "optimizer.param_groups.<i>.lr", "….betas", …, "….params" (names);
///   "optimizer.type".
/// For Adam, AdamW, SGD, RMSprop and Adagrad; any other optimizer is an error. Every parameter of the optimizer must be one of
/// the module's. Loading creates the optimizer's state where it does not exist yet, and drops what the checkpoint does not hold.
/// The module and the optimizer must outlive the state dict. Local.
StateDict state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer);

} // namespace tessera
