#include <tessera/fsdp/shard_script.h>

#include <c10/util/Exception.h>

#include <absl/container/flat_hash_set.h>

#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <tessera/fsdp/fully_shard.h>

namespace tessera {

namespace {

using Rule = std::function<bool(const std::string& path, ScriptModuleImpl& module)>;

/// The submodules for which `rule` holds, each after those below it, once.
class Selection {
 public:
  explicit Selection(const Rule& rule) : rule_(rule) {}

  std::vector<ScriptModuleImpl*> below(ScriptModuleImpl& root) && {
    descend(root, "");
    return std::move(chosen_);
  }

 private:
  void descend(ScriptModuleImpl& module, const std::string& path) {
    for (const auto& child : module.named_children()) {
      auto& below = static_cast<ScriptModuleImpl&>(*child.value());
      if (!seen_.insert(&below).second) continue;
      auto name = path.empty() ? child.key() : path + "." + child.key();
      descend(below, name);
      if (rule_(name, below)) chosen_.push_back(&below);
    }
  }

  const Rule& rule_;
  absl::flat_hash_set<const ScriptModuleImpl*> seen_;
  std::vector<ScriptModuleImpl*> chosen_;
};

std::vector<ScriptModuleImpl*> select(ScriptModuleImpl& root, const Rule& rule) { return Selection(rule).below(root); }

std::set<std::string> class_names(const ScriptModuleImpl& root) {
  std::set<std::string> names;
  for (const auto& module : root.modules(/*include_self=*/false)) names.insert(module->name());
  return names;
}

bool has_parameters(const ScriptModuleImpl& module) { return !module.parameters().empty(); }

} // namespace

ScriptGroups submodules(std::vector<std::string> paths) {
  return ScriptGroups([paths = std::move(paths)](ScriptModuleImpl& root) {
    absl::flat_hash_set<const ScriptModuleImpl*> named;
    for (const auto& path : paths) {
      const auto module = root.at(path);
      TORCH_CHECK_VALUE(module.get() != &root, "fully_shard: the path \"", path, "\" is the script itself, which gets what its ",
                        "submodules leave: leave it out");
      TORCH_CHECK_VALUE(has_parameters(*module), "fully_shard: the submodule ", path, " of the script ", root.name(),
                        " has no parameter");
      named.insert(module.get());
    }
    return select(root, [&](const std::string&, ScriptModuleImpl& module) { return named.contains(&module); });
  });
}

ScriptGroups submodules_of_class(std::string class_name) {
  return ScriptGroups([class_name = std::move(class_name)](ScriptModuleImpl& root) {
    auto chosen = select(root, [&](const std::string&, ScriptModuleImpl& module) { return module.name() == class_name; });
    TORCH_CHECK_VALUE(!chosen.empty(), "fully_shard: the script ", root.name(), " has no submodule of the class ", class_name,
                      class_names(root).empty() ? std::string("; it has no submodules: a frozen export has none")
                                                : fmt::format("; it has {}", fmt::join(class_names(root), ", ")));
    std::erase_if(chosen, [](const auto* module) { return !has_parameters(*module); });
    return chosen;
  });
}

ScriptGroups submodules_where(std::function<bool(const std::string& path, const std::string& class_name)> rule) {
  TORCH_CHECK_VALUE(rule, "fully_shard: the rule for submodules is an empty function");
  return ScriptGroups([rule = std::move(rule)](ScriptModuleImpl& root) {
    auto chosen = select(root, [&](const std::string& path, ScriptModuleImpl& module) {
      return rule(path, module.name()) && has_parameters(module);
    });
    TORCH_CHECK_VALUE(!chosen.empty(), "fully_shard: the rule holds for no submodule of the script ", root.name(),
                      " that has parameters");
    return chosen;
  });
}

ScriptModule fully_shard(const torch::jit::Module& script, const DeviceMesh& mesh, const ScriptGroups& groups,
                         const FullyShardOptions& options) {
  ScriptModule model(script);
  for (auto* group : groups.of(*model)) fully_shard(static_cast<torch::nn::Module&>(*group), mesh, options);
  fully_shard(static_cast<torch::nn::Module&>(*model), mesh, options);
  return model;
}

ScriptModule fully_shard(const torch::jit::Module& script, const DeviceMesh& mesh, const FullyShardOptions& options) {
  ScriptModule model(script);
  fully_shard(static_cast<torch::nn::Module&>(*model), mesh, options);
  return model;
}

} // namespace tessera
