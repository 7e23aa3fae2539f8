#include <tessera/dtensor/dispatch/fallback.h>

#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <typeinfo>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/dispatch/plan_cache.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/strict_sharding.h>

namespace tessera {

namespace {
thread_local int implicit_replication = 0, strict_sharding = 0;
}

ImplicitReplication::ImplicitReplication() { ++implicit_replication; }
ImplicitReplication::~ImplicitReplication() { --implicit_replication; }
StrictSharding::StrictSharding() { ++strict_sharding; }
StrictSharding::~StrictSharding() { --strict_sharding; }

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

const SpecPtr* first_spec(const Stack& stack, size_t begin) {
  for (size_t i = begin; i < stack.size(); ++i) {
    const auto elements = stack[i].isTensorList() ? stack[i].toListRef() : c10::ArrayRef<c10::IValue>(stack[i]);
    for (const auto& element : elements) {
      const auto* meta = element.isTensor() ? dtensor_meta(element.toTensor()) : nullptr;
      if (meta) return &meta->spec;
    }
  }
  return nullptr;
}

/// Whether a decomposition runs that writes temporaries of its own only, and whose plain tensors are the same on every rank.
thread_local bool has_own_temporaries = false;

/// A derivative formula or a decomposition makes plain zeros, the same on every rank, and writes DTensors into them: they become
/// replicated DTensors.
void adopt_temporaries(const OpInfo& info, const Stack& stack, size_t begin) {
  const auto* spec = first_spec(stack, begin);
  for (size_t i = 0; spec && i < info.arguments.size(); ++i) {
    const auto& value = stack[begin + i];
    if (!info.arguments[i].written || !value.isTensor() || !value.toTensor().defined()) continue;
    const auto& tensor = value.toTensor();
    if (dtensor_meta(tensor) || tensor.is_inference() || tensor.storage().use_count() != 1) continue;
    const auto& mesh = (*spec)->mesh();
    auto layout = Spec::intern(mesh, Placements(mesh.ndim()), tensor.sizes().vec(), tensor.scalar_type(), tensor.strides().vec());
    become_dtensor(tensor, c10::make_intrusive<DTensorMeta>(tensor.detach(), std::move(layout)));
  }
}

bool has_plain_tensors(const Stack& stack, size_t begin) {
  for (size_t i = begin; i < stack.size(); ++i) {
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
    if (stack[i].toTensor().dim() > 0 && !dtensor_meta(stack[i].toTensor())) return true;
  }
  return false;
}

/// Runs the operator as others. A kernel that ends in the operator itself is no decomposition.
void decompose(const c10::OperatorHandle& op, const OpInfo& info, c10::DispatchKey key, Stack* stack) {
  constexpr int kDeepest = 64;
  thread_local int depth = 0;
  struct Level {
    explicit Level(bool own) : before_(has_own_temporaries) {
      ++depth;
      has_own_temporaries = before_ || own;
    }
    ~Level() {
      --depth;
      has_own_temporaries = before_;
    }

   private:
    bool before_;
  };
  const bool no_plain = !has_plain_tensors(*stack, stack->size() - info.arguments.size());
  const Level level(no_plain && !info.writes);
  if (depth > kDeepest) no_rule(info, *stack, stack->size() - info.arguments.size());
  // What a decomposition makes of its own (masks, ranges) is the same on every rank.
  std::optional<ImplicitReplication> own_constants;
  if (no_plain) own_constants.emplace();
  op.callBoxedForDispatchKey(key, *stack);
}

/// An operator that is run on whole tensors, where that moves data: an error under StrictSharding, else a warning, once.
void note_replication(const OpInfo& info, const Stack& stack, size_t begin, const Plan& plan) {
  const bool moves =
      std::any_of(plan.inputs.begin(), plan.inputs.end(), [](const auto& input) { return input.target != nullptr; });
  if (!moves) return;
  if (strict_sharding > 0) no_rule(info, stack, begin);
  static std::mutex mutex;
  static auto* warned = new absl::flat_hash_set<std::string>;
  const std::lock_guard lock(mutex);
  if (warned->insert(info.name).second) {
    TORCH_WARN(info.name,
               ": no sharding rule for this operator; its arguments are redistributed to Replicate(). Under "
               "tessera::StrictSharding this is an error");
  }
}

} // namespace

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& info = op_info(op);
  const auto* rule = info.rule;
  if (C10_UNLIKELY(!rule || rule->handler || rule->decompose)) {
    if (rule && rule->handler) return rule->handler(op, stack);
    if (rule) return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
    if (info.decomposition) return decompose(op, info, *info.decomposition, stack);
    no_rule(info, *stack, stack->size() - info.arguments.size());
  }
  const size_t begin = stack->size() - info.arguments.size();
  Origin origin{has_own_temporaries || (info.backward_matters && !at::GradMode::is_enabled() && in_derivative_formula())};
  CallKey key;
  if (C10_UNLIKELY(origin.own_temporaries)) key.push_back(1);
  if (C10_UNLIKELY(origin.own_temporaries && info.writes)) adopt_temporaries(info, *stack, begin);
  const auto state = make_key(info, *stack, begin, key);
  const bool cacheable = state == KeyState::kComplete;
  if (C10_UNLIKELY(state == KeyState::kPlainTensor && !at::GradMode::is_enabled())) {
    origin.own_temporaries = origin.own_temporaries || in_derivative_formula();
  }
  auto plan = cacheable ? plans.find(key) : nullptr;
  if (plan) {
    ++hits;
  } else {
    ++misses;
    plan = std::make_shared<Plan>(make_plan(op, info, *stack, begin, origin));
    if (cacheable) plans.insert(key, plan);
  }
  if (C10_UNLIKELY(info.replicates)) note_replication(info, *stack, begin, *plan);
  execute(op, info, *plan, stack);
}

namespace {

/// Operators that autograd takes apart before the DTensor key sees them, and that make plain tensors of their own or write into
/// what they compute.
constexpr std::array kComposites{"_scaled_dot_product_attention_math",
                                 "combinations",
                                 "cosine_similarity",
                                 "cross_entropy_loss",
                                 "istft",
                                 "linalg_matrix_rank.atol_rtol_float",
                                 "linalg_matrix_rank.atol_rtol_tensor",
                                 "nanquantile",
                                 "nanquantile.scalar",
                                 "one_hot",
                                 "quantile",
                                 "quantile.scalar",
                                 "rms_norm"};

void run_composite(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  constexpr auto kKernel = c10::DispatchKey::CompositeImplicitAutograd;
  if (first_spec(*stack, stack->size() - op.schema().arguments().size())) return decompose(op, op_info(op), kKernel, stack);
  op.callBoxedForDispatchKey(kKernel, *stack);
}

void register_composites(torch::Library& library) {
  for (const auto* name : kComposites) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_composite>());
}

} // namespace

CacheStatistics cache_statistics() { return {hits, misses, plans.size()}; }
void clear_cache() { plans.clear(); }

} // namespace dispatch
} // namespace tessera

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { tessera::dispatch::register_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { tessera::dispatch::register_composites(library); }

TORCH_LIBRARY_IMPL(_, Fake, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&tessera::dispatch::run>()); }
