#include <tessera/activations/kept_results.h>

#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>

#include <tessera/activations/open_runs.h>
#include <tessera/activations/placed_tensors.h>
#include <tessera/base/meta_memory.h>
#include <tessera/collectives/backends/simulated/operator_watch.h>

namespace tessera::internal {

namespace {

/// That of DTensors, below autograd: on this thread it is every tensor's while results are kept.
constexpr c10::DispatchKey kKeepKey = c10::DispatchKey::Fake;

/// Returns tensors that share memory with nothing, and maybe integers, as attention does on GPUs.
bool is_functional(const c10::FunctionSchema& schema) {
  const auto is_plain = [](const c10::Argument& each) { return each.alias_info() == nullptr; };
  const auto is_kept = [](const c10::Argument& each) {
    return *each.type() == *c10::TensorType::get() || each.type()->isSubtypeOf(*c10::IntType::get());
  };
  const auto &arguments = schema.arguments(), &returns = schema.returns();
  return !returns.empty() && std::all_of(arguments.begin(), arguments.end(), is_plain) &&
         std::all_of(returns.begin(), returns.end(), is_plain) && std::all_of(returns.begin(), returns.end(), is_kept);
}

bool is_defined(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

c10::IValue copy_of(const c10::IValue& value) { return is_defined(value) ? value.toTensor().clone() : value; }

/// A stand-in has a shape alone. A planned model's own tensors are on the meta device too.
bool is_stand_in(const c10::IValue& value) {
  return is_defined(value) && value.toTensor().is_meta() && current_memory_use() == MemoryUse::kNothing;
}

} // namespace

KeptResultsScope::KeptResultsScope(KeptResults* results)
    : results_(results), innermost_(open_runs->results, results ? this : nullptr) {
  c10::impl::tls_set_dispatch_key_included(kKeepKey, results != nullptr);
}

KeptResultsScope::KeptResultsScope(KeptResults* results, const TakerScope& taker) : KeptResultsScope(results) { taker_ = &taker; }

KeptResultsScope::KeptResultsScope(KeptResults* results, KeptResults::Values values) : KeptResultsScope(results) {
  values_ = std::move(values);
}

KeptResultsScope::~KeptResultsScope() { c10::impl::tls_set_dispatch_key_included(kKeepKey, innermost_.before() != nullptr); }

KeptResultsScope* KeptResultsScope::active() { return open_runs->results; }

void KeptResultsScope::run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, std::vector<c10::IValue>* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  const bool counts = is_functional(schema) && std::none_of(arguments.begin(), arguments.end(), is_stand_in);
  const KeptResults::Call call{&schema, counts ? calls_[&schema]++ : 0};
  const bool keeps = counts && !values_ && results_->policy_(op, arguments);
  // Not the operators that a kernel calls: the second run does not come to those of a result that is kept.
  const c10::impl::ExcludeDispatchKeyGuard uncounted(kKeepKey);
  if (!counts) return op.redispatchBoxed(keys, stack);
  if (values_) {
    const auto found = values_->find(call);
    if (found == values_->end()) return op.redispatchBoxed(keys, stack);
    forget_running_operator();
    stack->resize(stack->size() - arguments.size());
    for (const auto& each : found->second)
      stack->push_back(copy_of(each)); // which the function may write, also where a view does
    return results_->kept_.at(call).rng.restore();
  }
  op.redispatchBoxed(keys, stack);
  if (keeps) keep(call, op, *stack);
}

void KeptResultsScope::keep(const KeptResults::Call& call, const c10::OperatorHandle& op,
                            const std::vector<c10::IValue>& stack) const {
  const TakerScope outside(taker_->before());
  std::optional<PlacedTensors> placed;
  if (results_->place_) placed.emplace(results_->place_);
  KeptResults::Kept kept;
  std::vector<at::Tensor> tensors;
  for (const auto& each : torch::jit::last(stack, op.schema().returns().size())) {
    if (is_defined(each)) tensors.push_back(each.toTensor());
    kept.results.push_back(is_defined(each)
                               ? KeptResults::Result(KeptResults::SavedVariable(each.toTensor().clone(), /*is_output=*/false))
                               : KeptResults::Result(each));
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded)) kept.rng = RngState(tensors);
  results_->kept_.insert_or_assign(call, std::move(kept));
}

KeptResults::Values KeptResults::values() const {
  Values values;
  for (const auto& [call, kept] : kept_) {
    for (const auto& each : kept.results) {
      const auto* const tensor = std::get_if<SavedVariable>(&each);
      values[call].push_back(tensor ? c10::IValue(tensor->unpack()) : std::get<c10::IValue>(each));
    }
  }
  return values;
}

} // namespace tessera::internal
