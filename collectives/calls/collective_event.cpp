#include <tessera/collectives/calls/collective_event.h>

#include <ATen/core/ivalue.h>
#include <c10/util/ScopeExit.h>

#include <utility>
#include <vector>

namespace tessera::internal {

namespace {

constinit PerThread<bool> is_in_parts;

} // namespace

std::optional<at::StepCallbacks> CollectiveEvent::observers() {
  if (*is_in_parts) return std::nullopt;
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
}

CollectiveEvent::CollectiveEvent(at::StepCallbacks&& observers, const char* collective, c10::ArrayRef<at::Tensor> inputs)
    : name_(std::string("tessera:") + collective), range_(std::move(observers)), profile_(c10::ThreadLocalDebugInfo::current()) {
  range_._setAsync(); // its end may be seen on another thread
  std::vector<c10::IValue> values;
  if (range_.needsInputs()) values.assign(inputs.begin(), inputs.end());
  range_.before(name_, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
}

CollectiveEvent::Ptr CollectiveEvent::begin(const char* collective, c10::ArrayRef<at::Tensor> inputs) {
  auto found = observers();
  return found ? std::make_shared<CollectiveEvent>(std::move(*found), collective, inputs) : nullptr;
}

void CollectiveEvent::end() {
  std::call_once(ended_, [this] {
    auto before = c10::ThreadLocalDebugInfo::current();
    const auto restore = c10::make_scope_exit([&] { c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before)); });
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(profile_.lock());
    range_.end();
  });
}

CollectiveEvent::Parts::Parts() : in_parts_(*is_in_parts, true) {}

} // namespace tessera::internal
