#include <tessera/dtensor/dispatch/call_site.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <typeinfo>

#include <tessera/activations/recomputation.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/dispatch/op_info.h>
#include <tessera/dtensor/dispatch/visit_tensors.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/in_backward.h>
#include <tessera/dtensor/move.h>
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
constexpr auto kFormula = "8autograd9generated";      // the backward of an operator of PyTorch's own
constexpr auto kCopySlices = "8autograd10CopySlices"; // which runs the formula of what wrote a view
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

/// Whether autograd is at a node with a formula, and no function runs again for what the node saved. Hooks are called there too.
bool at_formula() { return current_node_is(kFormula) && !in_second_run(); }

/// In a node itself, not in a hook: `Node::operator()` excludes Named, and hooks run before and after it. A backward that a node
/// calls inherits the exclusion, so its hooks count as nodes (docs/limits.md).
bool in_node() { return c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::Named); }

bool in_formula() { return in_node() && at_formula(); }

bool is_program_value(const at::Tensor& plain) { return plain.dim() > 0 && !dtensor_meta(plain) && !has_only_zeros(plain); }

/// Whether autograd may sum up gradients, as it does where hooks are called: a formula made plain zeros for one of them. In place
/// it adds to these alone.
bool adds_gradients(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  const bool in_place = info.name == "aten::add_.Tensor";
  if (!at_formula() || !(in_place || info.name == "aten::add.Tensor")) return false;
  const auto& sum = arguments[0].toTensor();
  if (in_place && (sum.dim() == 0 || dtensor_meta(sum))) return false;
  return !any_tensor(info, arguments, [](const at::Tensor& tensor, size_t) { return is_program_value(tensor); });
}

} // namespace

bool in_custom_backward() { return current_node_is(kCustomBackward); }
bool in_nested_forward() {
  if (!in_backward() || !at::GradMode::is_enabled()) return false;
  // A formula has grad mode with `create_graph` alone, which keeps the graph. Then a hook that is in an operator which excludes
  // Named itself (matmul) is taken for a formula.
  if (!torch::autograd::get_current_graph_task_keep_graph()) return true;
  return !in_node() || !(current_node_is(kFormula) || current_node_is(kCopySlices));
}
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
      own_temporaries_(current.own_temporaries || (info.backward_matters && (in_formula() || adds_gradients(info, arguments)))),
      shares_written_(own_temporaries_ && info.writes && shares_what_it_writes(info, arguments)) {}

bool CallSite::ask_own_temporaries() {
  return own_temporaries_ = own_temporaries_ || in_formula() || adds_gradients(info_, arguments_);
}

} // namespace internal::dispatch
} // namespace tessera
