#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// While it lives, TorchScript runs graphs of this thread as they are written: `torch::jit::setGraphExecutorOptimize(false)`. The
/// optimizing executor differentiates by itself, and compiles other graphs in later runs. So a read of a sharded parameter from
/// TorchScript on a thread without this scope is an error. A `ScriptModule` opens one whenever it runs; a program that runs the
/// torch::jit::Module itself opens its own.
class [[nodiscard]] PlainExecutor {
 public:
  PlainExecutor();
  ~PlainExecutor();
  PlainExecutor(const PlainExecutor&) = delete;
  PlainExecutor& operator=(const PlainExecutor&) = delete;

 private:
  bool before_;
};

/// A TorchScript module, scripted or traced, as a torch::nn::Module: with the parameters, buffers and submodules of the script,
/// under Python's names. They are the script's own tensors: what changes them in place changes both. So all that takes a
/// torch::nn::Module takes this one: `fully_shard` (of submodules too, see `at`), `no_sync`, `clip_grad_norm_`, `state_dict`,
/// `checkpoint::save`, `summary`, `recompute`, `call`, an optimizer.
///
/// A buffer that the script assigns (`self.seen = self.seen + 1`) is followed after each run, and wherever the library reads
/// buffers. Then `recompute` of it is an error in backward: its second run would find the later one. A parameter or a submodule
/// that is replaced (by `setattr`, or by the script) is an error in the next forward. `train` and `eval` reach the script, of
/// which a traced one keeps the mode in which it was traced. `name()` is the class in Python. `clone` is an error, as for any
/// module that does not define it.
///
/// Use it through the holder `ScriptModule`. Runs of one module on several threads may overlap if the script assigns nothing.
class ScriptModuleImpl final : public torch::nn::Module {
 public:
  /// The script's own object, not a copy: `script().forward(…)` in a `PlainExecutor` is the same computation.
  const torch::jit::Module& script() const { return script_; }

  /// Runs a method: `forward`, or one that was exported. An error for a name that the script does not have.
  c10::IValue run(const std::string& method, std::vector<c10::IValue> inputs, const torch::jit::Kwargs& named = {});

  /// Runs a method on what an IValue can hold, and returns its result as a `Result`:
  ///   model->method<std::tuple<Tensor, Tensor>>("encode", x, lengths)
  /// An error if the script returns something else.
  template <typename Result = at::Tensor, typename... Inputs>
  Result method(const std::string& name, Inputs&&... inputs) {
    auto result = run(name, {c10::IValue(std::forward<Inputs>(inputs))...});
    if constexpr (std::is_same_v<Result, at::Tensor>)
      TORCH_CHECK_TYPE(result.isTensor(), "the method ", name, " of the script ", this->name(), " returned a ", result.tagKind(),
                       " and no tensor: name its type, as in method<std::tuple<at::Tensor, at::Tensor>>(\"", name, "\", …)");
    return std::move(result).template to<Result>();
  }

  /// Runs `forward` in the same way.
  template <typename Result = at::Tensor, typename... Inputs>
  Result forward(Inputs&&... inputs) {
    return method<Result>("forward", std::forward<Inputs>(inputs)...);
  }

  /// The submodule with this path, as "encoder.layers.0"; "" is the module itself. An error names the nearest path.
  std::shared_ptr<ScriptModuleImpl> at(const std::string& path);

  void train(bool on = true) override;
  bool is_training() const noexcept override;

 private:
  friend class ScriptModule;
  friend struct ScriptRegistry;
  explicit ScriptModuleImpl(const torch::jit::Module& script);
  static std::shared_ptr<ScriptModuleImpl> of(const torch::jit::Module& script);

  torch::jit::Module script_;
  std::string assigned_; ///< a buffer that the script replaced by another tensor; "" for none so far
};

/// Holder of a ScriptModuleImpl: `ScriptModule model(torch::jit::load("model.pt"))`. All holders of one script share one module,
/// as long as one of them, or of a module above it, lives. Local.
class ScriptModule : public torch::nn::ModuleHolder<ScriptModuleImpl> {
 public:
  explicit ScriptModule(const torch::jit::Module& script);
  ScriptModule(std::shared_ptr<ScriptModuleImpl> module) : ModuleHolder(std::move(module)) {}
  ScriptModule(std::nullptr_t) : ModuleHolder(nullptr) {}
};

} // namespace tessera
