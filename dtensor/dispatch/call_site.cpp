#include <tessera/dtensor/dispatch/call_site.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <typeinfo>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/dispatch/op_info.h>
#include <tessera/dtensor/dispatch/visit_tensors.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/program_scopes.h>
#include <tessera/dtensor/strict_sharding.h>

namespace tessera {

ImplicitReplication::ImplicitReplication()
    : scope_(internal::open_scope([](auto& scopes) { scopes.implicit_replication = true; })) {}
StrictSharding::StrictSharding() : scope_(internal::open_scope([](auto& scopes) { scopes.strict_sharding = true; })) {}

namespace internal::dispatch {

namespace {

thread_local Decompositions current;

// Nodes are told apart by their mangled names: a dynamic_cast to a formula does not work across libraries, and a program's own
// node is a template over a class of its own, which no cast can ask for.
//
// Checked with LibTorch
//   2.11.0
//   2.15.0
constexpr auto kFormula = "8autograd9generated"; // the backward of an operator of PyTorch's own
constexpr auto kCustomBackward = "7CppNode";

bool current_node_is(const char* mangled) {
  const auto node = torch::autograd::get_current_node();
  if (!node) return false;
  const auto& type = *node;
  return std::strstr(typeid(type).name(), mangled) != nullptr;
}

/// Whether a DTensor that the call writes shares its memory with others.
bool shares_what_it_writes(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  return any_tensor(info, arguments, [&](const at::Tensor& tensor, size_t i) {
    const auto* meta = info.arguments[i].written ? dtensor_meta(tensor) : nullptr;
    return meta && shares_memory(*meta);
  });
}

/// Whether it writes a sharded parameter: a hook's, which runs where the derivative formula does.
bool writes_parameter(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  return info.writes && any_tensor(info, arguments, [&](const at::Tensor& tensor, size_t i) {
           return info.arguments[i].written && tensor.key_set().has(c10::DispatchKey::DeferredInit);
         });
}

} // namespace

bool in_custom_backward() { return current_node_is(kCustomBackward); }
const Decompositions& decompositions() { return current; }
bool replicates_plain_tensors() { return current.all_dtensors || program_scopes().implicit_replication; }

DecompositionScope::DecompositionScope(bool all_dtensors, bool writes_argument) : before_(current) {
  ++current.depth;
  if (!all_dtensors) return;
  current.all_dtensors = true;
  current.own_temporaries |= !writes_argument;
}

DecompositionScope::~DecompositionScope() { current = before_; }

CallSite::CallSite(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments)
    : info_(info),
      arguments_(arguments),
      own_temporaries_(current.own_temporaries || (info.backward_matters && in_formula())),
      shares_written_(own_temporaries_ && info.writes && shares_what_it_writes(info, arguments)) {}

bool CallSite::in_formula() const { return current_node_is(kFormula) && !writes_parameter(info_, arguments_); }

} // namespace internal::dispatch
} // namespace tessera
