#include <tessera/tests/support/simulated_device/host_accesses.h>

#include <tessera/tests/support/simulated_device/boxed.h>
#include <tessera/tests/support/simulated_device/caching_allocator.h>
#include <tessera/tests/support/simulated_device/host_watch.h>
#include <tessera/tests/support/simulated_device/operator_traits.h>
#include <tessera/tests/support/simulated_device/runtime.h>

#include <ATen/record_function.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing::sim {

namespace {

/// Operators that look at a tensor, and not at its memory.
bool reads_no_memory(const c10::OperatorHandle& op, const OperatorTraits& traits) {
  return traits.kind == OperatorTraits::Kind::kView || op.schema().name() == "aten::is_pinned";
}

bool is_pinned(const at::Tensor& tensor) {
  const bool is_in_memory = tensor.is_cpu() && tensor.has_storage() && tensor.numel() > 0;
  return is_in_memory && PinnedAllocator::get().holds(tensor.storage().data());
}

bool has_pinned(c10::ArrayRef<const IValue> arguments) {
  bool found = false;
  for (const auto& argument : arguments)
    for_each_tensor(argument, [&](const at::Tensor& tensor) { found = found || is_pinned(tensor); });
  return found;
}

/// Of one operator. There are none where a tensor of the device takes part, or is made: then the device does the work, and notes
/// it.
std::vector<Use> host_uses(const OperatorTraits& traits, c10::ArrayRef<const IValue> arguments) {
  std::vector<Use> uses;
  bool is_of_device = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    is_of_device = is_of_device || (arguments[i].isDevice() && arguments[i].toDevice().type() == kDeviceType);
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      is_of_device = is_of_device || is_on_device(tensor);
      if (is_pinned(tensor)) uses.push_back({Region::of(tensor), traits.is_written[i]});
    });
  }
  return is_of_device ? std::vector<Use>() : uses;
}

std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& call) {
  if (!has_pinned(call.inputs())) return nullptr; // as most
  const auto name = call.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!op) return nullptr;
  const auto& traits = OperatorTraits::of(*op);
  if (reads_no_memory(*op, traits)) return nullptr;
  auto uses = host_uses(traits, call.inputs());
  if (!uses.empty()) Runtime::get().note_host(op->schema().name(), uses);
  return nullptr;
}

} // namespace

void watch_host_accesses() {
  HostWatch::get().set(at::RecordFunctionCallback(&note).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

} // namespace tessera::testing::sim
