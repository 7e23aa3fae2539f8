#pragma once

#include <torch/csrc/jit/api/module.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/nn/script_module.h>

namespace tessera {

/// Which submodules of a script become groups of their own; what they leave is the root's group. Made by the functions below.
class ScriptGroups {
 public:
  /// The modules to shard, from the bottom up, and not the root itself.
  using Choose = std::function<std::vector<ScriptModuleImpl*>(ScriptModuleImpl& root)>;
  explicit ScriptGroups(Choose choose) : choose_(std::move(choose)) {}
  std::vector<ScriptModuleImpl*> of(ScriptModuleImpl& root) const { return choose_(root); }

 private:
  Choose choose_;
};

/// Chooses those with these paths, as "encoder.layers.0". A path without a submodule, or of one without parameters, is an error.
ScriptGroups submodules(std::vector<std::string> paths);
/// Chooses those of a class, by its name in Python without its module: "EncoderLayer". An error where there is none.
ScriptGroups submodules_of_class(std::string class_name);
/// Chooses those for which the rule holds and that have parameters. The rule gets the path and the name of the class, and must
/// give the same on every rank. An error if it holds for none.
ScriptGroups submodules_where(std::function<bool(const std::string& path, const std::string& class_name)> rule);

/// Shards a TorchScript module, scripted or traced, in place: the script's own slots hold the sharded parameters. Otherwise as
/// `fully_shard` of a torch::nn::Module, which the returned ScriptModule is:
///   auto script = torch::jit::load("model.pt");
///   auto model = tessera::fully_shard(script, mesh, tessera::submodules_of_class("EncoderLayer"), options);
///   auto loss = model->forward(x);
/// Keep the ScriptModule as long as the model is trained; `ScriptModule(script)` gives it again. What the optimizing executor
/// compiled of the script before is forgotten.
///
/// Errors besides those of `fully_shard`: a script whose weights are constants, as torch.jit.freeze and optimize_for_inference
/// leave it. Every rank of the mesh calls it, with the same script and groups.
[[nodiscard]] ScriptModule fully_shard(const torch::jit::Module& script, const DeviceMesh& mesh, const ScriptGroups& groups,
                                       const FullyShardOptions& options = {});
/// Shards it as one group.
[[nodiscard]] ScriptModule fully_shard(const torch::jit::Module& script, const DeviceMesh& mesh,
                                       const FullyShardOptions& options = {});

} // namespace tessera
