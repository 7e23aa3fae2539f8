#include <tessera/nn/script_module.h>

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <string_view>
#include <typeinfo>
#include <unordered_map>

#include <tessera/activations/recomputation.h>
#include <tessera/base/edit_distance.h>
#include <tessera/nn/follow_scripts.h>

namespace tessera {

namespace {

using Buffers = torch::OrderedDict<std::string, at::Tensor>;

/// Module registers a buffer once and gives copies away, so that nothing can put another tensor under its name. An explicit
/// instantiation may name a private member.
template <Buffers torch::nn::Module::*Member>
struct BuffersOf {
  friend Buffers& buffers_of(torch::nn::Module& module) { return module.*Member; }
};
template struct BuffersOf<&torch::nn::Module::buffers_>;
Buffers& buffers_of(torch::nn::Module& module);

struct Parameters : torch::nn::Module {
  static const auto& of(const torch::nn::Module& module) { return module.*(&Parameters::parameters_); }
};

/// "Linear" of "__torch__.torch.nn.modules.linear.___torch_mangle_3.Linear".
std::string python_class(const torch::jit::Module& script) {
  const auto name = script.type()->name();
  return name ? name->name() : "ScriptModule";
}

const ScriptModuleImpl* as_script(const torch::nn::Module& module) {
  return typeid(module) == typeid(ScriptModuleImpl) ? static_cast<const ScriptModuleImpl*>(&module) : nullptr;
}

template <typename Visit> // void(const ScriptModuleImpl&)
void for_each_script(const torch::nn::Module& module, const Visit& visit) {
  if (const auto* script = as_script(module)) visit(*script);
  for (const auto& child : module.children()) for_each_script(*child, visit);
}

/// The slots of a script itself, without those of its submodules.
template <typename Visit> // void(const std::string& name, size_t slot, const c10::ClassType& type)
void for_each_slot(const torch::jit::Module& script, const Visit& visit) {
  const auto type = script.type();
  for (size_t slot = 0; slot < type->numAttributes(); ++slot) visit(type->getAttributeName(slot), slot, *type);
}

bool holds_tensor(const torch::jit::Module& script, size_t slot) {
  const auto& value = script._ivalue()->getSlot(slot);
  return value.isTensor() && value.toTensor().defined();
}

/// The graph of a method; null for one that has none.
torch::jit::GraphFunction* graph_function(const torch::jit::Method& method) {
  return torch::jit::tryToGraphFunction(method.function());
}

bool has_constant_tensors(const torch::jit::Block& block) {
  return std::any_of(block.nodes().begin(), block.nodes().end(), [](const torch::jit::Node* node) {
    const bool is_tensor = node->kind() == c10::prim::Constant && node->hasAttribute(c10::attr::value) &&
                           node->kindOf(c10::attr::value) == torch::jit::AttributeKind::t;
    const auto& blocks = node->blocks();
    return is_tensor || std::any_of(blocks.begin(), blocks.end(), [](const auto* inner) { return has_constant_tensors(*inner); });
  });
}

/// Paths of the modules below `module`, with the number of changes to `path` of the nearest.
std::string nearest_path(const ScriptModuleImpl& module, const std::string& path) {
  std::string nearest;
  auto fewest = std::numeric_limits<size_t>::max();
  for (const auto& item : module.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    const auto distance = internal::edit_distance(path, item.key());
    if (distance < fewest) nearest = item.key();
    fewest = std::min(distance, fewest);
  }
  return nearest;
}

} // namespace

/// The modules of scripts that live now. The address of a script's object is its own as long as its module lives, which holds it.
struct ScriptRegistry {
  std::mutex mutex;
  std::unordered_map<const void*, std::weak_ptr<ScriptModuleImpl>> modules;

  static ScriptRegistry& instance() {
    static auto* const registry = new ScriptRegistry; // a module may go after the statics of this file
    return *registry;
  }

  std::shared_ptr<ScriptModuleImpl> find(const void* object) {
    const std::lock_guard lock(mutex);
    const auto found = modules.find(object);
    return found == modules.end() ? nullptr : found->second.lock();
  }

  /// Takes the buffers of the script itself as they are now.
  static void follow(ScriptModuleImpl& module) {
    auto& registered = buffers_of(module);
    for_each_slot(module.script_, [&](const std::string& name, size_t slot, const c10::ClassType& type) {
      if (!type.is_buffer(slot) || !holds_tensor(module.script_, slot)) return;
      const auto tensor = module.script_._ivalue()->getSlot(slot).toTensor();
      auto* const known = registered.find(name);
      if (known && known->is_same(tensor)) return;
      known ? void(*known = tensor) : void(registered.insert(name, tensor));
      module.assigned_ = name;
    });
  }

  static void check_recomputable(const ScriptModuleImpl& module) {
    TORCH_CHECK(module.assigned_.empty(), "the script ", module.name(), " is recomputed, but assigns its buffer ",
                module.assigned_,
                " (or the program does), of which the second run would find the later values: write it in place ", "(self.",
                module.assigned_, ".copy_(…) in Python), or recompute parts that do not assign it");
  }

  /// Keeps `made`, unless another thread was first.
  std::shared_ptr<ScriptModuleImpl> add(const void* object, std::shared_ptr<ScriptModuleImpl> made) {
    const std::lock_guard lock(mutex);
    std::erase_if(modules, [](const auto& each) { return each.second.expired(); });
    const auto [found, is_new] = modules.emplace(object, made);
    auto first = is_new ? nullptr : found->second.lock();
    return first ? first : made;
  }
};

PlainExecutor::PlainExecutor() : before_(torch::jit::getGraphExecutorOptimize()) { torch::jit::setGraphExecutorOptimize(false); }

PlainExecutor::~PlainExecutor() { torch::jit::setGraphExecutorOptimize(before_); }

ScriptModuleImpl::ScriptModuleImpl(const torch::jit::Module& script) : Module(python_class(script)), script_(script) {
  for_each_slot(script_, [&](const std::string& name, size_t slot, const c10::ClassType& type) {
    const auto& value = script_._ivalue()->getSlot(slot);
    if (type.getAttribute(slot)->is_module()) {
      if (value.isModule()) register_module(name, of(value.toModule()));
    } else if (holds_tensor(script_, slot)) {
      const auto tensor = value.toTensor();
      if (type.is_parameter(slot)) register_parameter(name, tensor, tensor.requires_grad());
      if (type.is_buffer(slot)) register_buffer(name, tensor);
    }
  });
}

std::shared_ptr<ScriptModuleImpl> ScriptModuleImpl::of(const torch::jit::Module& script) {
  const void* const object = script._ivalue().get();
  auto& registry = ScriptRegistry::instance();
  if (auto living = registry.find(object)) return living;
  return registry.add(object, std::shared_ptr<ScriptModuleImpl>(new ScriptModuleImpl(script)));
}

c10::IValue ScriptModuleImpl::run(const std::string& method, std::vector<c10::IValue> inputs, const torch::jit::Kwargs& named) {
  const auto found = script_.find_method(method);
  TORCH_CHECK_VALUE(found, "the script ", name(), " has no method \"", method, "\"",
                    method == "forward" ? "" : ": Python exports one beside forward with @torch.jit.export");
  if (internal::in_second_run()) for_each_script(*this, ScriptRegistry::check_recomputable);
  const PlainExecutor plain;
  auto result = (*found)(std::move(inputs), named);
  internal::follow_scripts(*this);
  return result;
}

std::shared_ptr<ScriptModuleImpl> ScriptModuleImpl::at(const std::string& path) {
  auto module = std::static_pointer_cast<ScriptModuleImpl>(shared_from_this());
  for (std::string_view rest = path; !rest.empty();) {
    const auto dot = std::min(rest.find('.'), rest.size());
    const auto children = module->named_children();
    const auto* next = children.find(std::string(rest.substr(0, dot)));
    const bool ends_in_dot = dot + 1 == rest.size();
    if (!next || ends_in_dot) {
      const auto nearest = nearest_path(*this, path);
      TORCH_CHECK_VALUE(false, "the script ", name(), " has no submodule \"", path, "\"",
                        nearest.empty() ? ": it has none at all" : "; the nearest is \"" + nearest + "\"");
    }
    module = std::static_pointer_cast<ScriptModuleImpl>(*next);
    rest.remove_prefix(std::min(dot + 1, rest.size()));
  }
  return module;
}

void ScriptModuleImpl::train(bool on) {
  Module::train(on); // and of each below
  if (script_.hasattr("training")) script_.setattr("training", on);
}

bool ScriptModuleImpl::is_training() const noexcept {
  const auto slot = script_.type()->findAttributeSlot("training");
  return slot ? script_._ivalue()->getSlot(*slot).toBool() : Module::is_training();
}

ScriptModule::ScriptModule(const torch::jit::Module& script) : ModuleHolder(ScriptModuleImpl::of(script)) {}

namespace internal {

void check_script(const torch::nn::Module& module) {
  const auto* const known = as_script(module);
  if (!known) return;
  const auto& script = known->script();
  const auto& parameters = Parameters::of(module);
  const auto children = module.named_children();
  const auto check = [&](bool is_same, const char* what, const std::string& name) {
    TORCH_CHECK(
        is_same, "the ", what, " ", name, " of the script ", module.name(), " is another one than when its ScriptModule was ",
        "made, and would not be trained: write new values into parameters (under no_grad, parameter.copy_(values)), or make ",
        "the ScriptModule and shard it after the change");
  };
  for_each_slot(script, [&](const std::string& name, size_t slot, const c10::ClassType& type) {
    const auto& value = script._ivalue()->getSlot(slot);
    if (type.is_parameter(slot)) {
      const auto* const parameter = parameters.find(name);
      const bool has = holds_tensor(script, slot);
      check(parameter ? has && value.toTensor().is_same(*parameter) : !has, "parameter", name);
    } else if (const auto* const child = children.find(name); child && type.getAttribute(slot)->is_module()) {
      check(value.isModule() && as_script(**child)->script()._ivalue() == value.toModule()._ivalue(), "submodule", name);
    }
  });
}

void follow_scripts(const torch::nn::Module& module) {
  for_each_script(module, [](const ScriptModuleImpl& script) {
    check_script(script);
    ScriptRegistry::follow(const_cast<ScriptModuleImpl&>(script));
  });
}

void forget_compiled(const torch::nn::Module& module) {
  if (!torch::jit::getExecutorMode()) return; // the executor before the profiling one, which keeps nothing of other threads
  for_each_script(module, [](const ScriptModuleImpl& script) {
    for (const auto& method : script.script().get_methods()) {
      if (auto* const function = graph_function(method)) function->get_executor().debugFlushCompilationCache();
    }
  });
}

std::string why_no_parameters(const torch::nn::Module& module) {
  const auto* const script = as_script(module);
  if (!script) return "";
  for (const auto& method : script->script().get_methods()) {
    const auto* const function = graph_function(method);
    if (function && has_constant_tensors(*function->graph()->block()))
      return ": its weights are constants of the graph of " + method.name() +
             ", as torch.jit.freeze and torch.jit.optimize_for_inference leave them, and constants cannot be trained. Export "
             "what "
             "torch.jit.script or torch.jit.trace returned, before these";
  }
  return "";
}

bool is_scripted_batch_norm(const torch::nn::Module& module) {
  return as_script(module) && module.name().starts_with("BatchNorm") && module.name().ends_with('d');
}

at::Tensor running_mean_of_script(const torch::nn::Module& module) {
  const bool is_norm = is_scripted_batch_norm(module) || (as_script(module) && module.name().starts_with("InstanceNorm"));
  const auto buffers = is_norm ? module.named_buffers(/*recurse=*/false) : Buffers();
  const auto* const mean = buffers.find("running_mean");
  return mean ? *mean : at::Tensor();
}

bool runs_optimized_script() { return torch::jit::getGraphExecutorOptimize() && !torch::jit::currentCallstack().empty(); }

} // namespace internal

} // namespace tessera
