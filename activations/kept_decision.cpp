#include <tessera/activations/kept_decision.h>

#include <c10/util/Exception.h>

#include <tessera/activations/open_runs.h>

namespace tessera::internal {

DecisionScope::DecisionScope(Decisions& decisions, Run run)
    : decisions_(decisions), run_(run), innermost_(open_runs->decisions, this) {}

std::vector<at::Tensor> decided_once(const std::function<std::vector<at::Tensor>()>& decide) {
  // An inner function's first run may be a part of an outer one's second, which knows what was decided.
  DecisionScope* second = nullptr;
  for (auto* scope = open_runs->decisions; scope && !second; scope = scope->innermost_.before()) {
    if (scope->run_ == DecisionScope::Run::kSecond) second = scope;
  }
  if (second) {
    TORCH_CHECK(second->next_ < second->decisions_.size(),
                "a function that is recomputed decides more in its second run than in its first");
  }
  auto decided = second ? second->decisions_[second->next_++] : decide();
  for (auto* scope = open_runs->decisions; scope && scope != second; scope = scope->innermost_.before())
    scope->decisions_.push_back(decided);
  return decided;
}

} // namespace tessera::internal
