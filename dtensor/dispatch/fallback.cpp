#include <tessera/dtensor/dispatch/fallback.h>

#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <cstring>
#include <typeinfo>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/dispatch/plan_cache.h>
#include <tessera/dtensor/dtensor_impl.h>

namespace tessera {

namespace {
thread_local int implicit_replication = 0;
}

ImplicitReplication::ImplicitReplication() { ++implicit_replication; }
ImplicitReplication::~ImplicitReplication() { --implicit_replication; }

namespace dispatch {

bool implicit_replication_enabled() { return implicit_replication > 0; }

namespace {

using torch::jit::Stack;

constexpr size_t kPlansPerGeneration = 4096;
thread_local PlanCache plans(kPlansPerGeneration);
thread_local uint64_t hits = 0, misses = 0;

[[noreturn]] void no_rule(const OpInfo& info, const Stack& stack, size_t begin) {
  std::string text;
  const DeviceMesh* mesh = nullptr;
  const auto visit = [&](const c10::IValue& value) {
    if (!value.isTensor()) return;
    const auto* meta = dtensor_meta(value.toTensor());
    if (!meta) return;
    mesh = &meta->spec->mesh();
    auto full = meta->spec->to_string();
    text += (text.empty() ? "" : ", ") + full.substr(0, full.rfind(" on "));
  };
  for (size_t i = begin; i < stack.size(); ++i) {
    if (stack[i].isTensor()) visit(stack[i]);
    if (stack[i].isTensorList()) {
      for (const auto& element : stack[i].toListRef()) visit(element);
    }
  }
  TORCH_CHECK(false, info.name, ": no sharding rule for this operator; arguments ", text, " on ",
              mesh ? mesh->to_string() : "no mesh", ". Redistribute to Replicate() and use to_local(), or full_tensor()");
}

/// True inside the backward of an operator of PyTorch's own, not of a user's torch::autograd::Function.
bool in_derivative_formula() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return false;
  const auto& formula = *node;
  return std::strstr(typeid(formula).name(), "8autograd9generated") != nullptr; // a dynamic_cast does not work across libraries
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& info = op_info(op);
  const auto* rule = info.rule;
  if (C10_UNLIKELY(!rule || rule->handler || rule->decompose)) {
    if (rule && rule->handler) return rule->handler(op, stack);
    if (rule) return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
    if (info.decomposes) return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    no_rule(info, *stack, stack->size() - info.arguments.size());
  }
  const size_t begin = stack->size() - info.arguments.size();
  const Origin origin{info.backward_matters && !at::GradMode::is_enabled() && in_derivative_formula()};
  CallKey key;
  if (C10_UNLIKELY(origin.backward_formula)) key.push_back(1);
  const bool cacheable = make_key(info, *stack, begin, key) == KeyState::kComplete;
  auto plan = cacheable ? plans.find(key) : nullptr;
  if (plan) {
    ++hits;
  } else {
    ++misses;
    plan = std::make_shared<Plan>(make_plan(op, info, *stack, begin, origin));
    if (cacheable) plans.insert(key, plan);
  }
  execute(op, info, *plan, stack);
}

} // namespace

CacheStatistics cache_statistics() { return {hits, misses, plans.size()}; }
void clear_cache() { plans.clear(); }

} // namespace dispatch
} // namespace tessera

TORCH_LIBRARY_IMPL(_, Fake, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&tessera::dispatch::run>()); }
