#include <tessera/dtensor/calls/call_origin.h>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <typeinfo>

#include <tessera/activations/recomputation.h>

namespace tessera::internal {

namespace {

// Nodes are told apart by their mangled names: a dynamic_cast to a formula does not work across libraries, and a program's own
// node is a template over a class of its own, which no cast can ask for.
//
// Checked with LibTorch
//   2.11.0
//   2.15.0
constexpr auto kFormulaNode = "8autograd9generated"; // the backward of an operator of PyTorch's own
constexpr auto kCopySlicesNode = "8autograd10CopySlices";
constexpr auto kFunctionNode = "7CppNode";

/// In a node itself, not in a hook: `Node::operator()` excludes Named, and hooks run before and after it. A backward that a node
/// calls inherits the exclusion.
bool in_node() { return c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::Named); }

} // namespace

CallOrigin origin_in_backward() {
  if (in_second_run()) return CallOrigin::kSecondRun;
  const auto node = torch::autograd::get_current_node();
  if (!node) return CallOrigin::kHook;
  const auto& type = *node;
  const char* const name = typeid(type).name();
  if (std::strstr(name, kFormulaNode)) return in_node() ? CallOrigin::kFormula : CallOrigin::kBesideFormula;
  if (std::strstr(name, kFunctionNode)) return CallOrigin::kFunction;
  return in_node() && std::strstr(name, kCopySlicesNode) ? CallOrigin::kWrittenView : CallOrigin::kHook;
}

bool is_forward(CallOrigin origin) {
  switch (origin) {
    case CallOrigin::kProgram:
    case CallOrigin::kSecondRun: return true;
    case CallOrigin::kFormula:
    case CallOrigin::kWrittenView:
      // A hook that is in an operator which excludes Named itself (matmul) is taken for a formula where the graph is kept.
      return at::GradMode::is_enabled() && !torch::autograd::get_current_graph_task_keep_graph();
    case CallOrigin::kFunction:
    case CallOrigin::kBesideFormula:
    case CallOrigin::kHook: return at::GradMode::is_enabled();
  }
  TORCH_INTERNAL_ASSERT(false);
}

} // namespace tessera::internal
