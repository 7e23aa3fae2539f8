#include <tessera/activations/kept_decision.h>

#include <c10/util/Exception.h>

#include <utility>

namespace tessera::internal {

namespace {

thread_local DecisionScope* innermost_decisions = nullptr;

} // namespace

DecisionScope::DecisionScope(Decisions& decisions, Run run)
    : decisions_(decisions), run_(run), around_(std::exchange(innermost_decisions, this)) {}

DecisionScope::~DecisionScope() { innermost_decisions = around_; }

std::vector<at::Tensor> decided_once(const std::function<std::vector<at::Tensor>()>& decide) {
  // An inner function's first run may be a part of an outer one's second, which knows what was decided.
  DecisionScope* second = nullptr;
  for (auto* scope = innermost_decisions; scope && !second; scope = scope->around_) {
    if (scope->run_ == DecisionScope::Run::kSecond) second = scope;
  }
  if (second) {
    TORCH_CHECK(second->next_ < second->decisions_.size(),
                "a function that is recomputed decides more in its second run than in its first");
  }
  auto decided = second ? second->decisions_[second->next_++] : decide();
  for (auto* scope = innermost_decisions; scope && scope != second; scope = scope->around_) scope->decisions_.push_back(decided);
  return decided;
}

} // namespace tessera::internal
