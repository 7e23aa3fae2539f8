#include <tessera/collectives/backends/simulated/operator_watch.h>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <tessera/base/dispatch_keys.h>
#include <tessera/base/per_thread.h>
#include <tessera/collectives/backends/simulated/flops.h>
#include <tessera/collectives/backends/simulated/traffic.h>

namespace tessera::internal {

namespace {

/// A call that runs on this thread.
struct Running {
  const at::RecordFunction* call;
  OperatorWork work;
  const OperatorTraffic* traffic = nullptr; ///< null where bytes are not counted, and for a call on DTensors
  bool is_on_parts = false;                 ///< a call on DTensors
  bool is_counted_inside = false;           ///< some call that it made has been counted
  bool calls_on_parts = false;              ///< some call that it made is one on DTensors
  int exceptions = std::uncaught_exceptions();
  bool was_broken_off() const { return std::uncaught_exceptions() > exceptions; }
};

/// What a watch knows of a thread.
struct Watched {
  std::vector<Running> running;
  const at::RecordFunction* outer_product = nullptr; ///< the outermost one that runs
  OperatorCounts* counts = nullptr;                  ///< of count_operators
  KnownTraffic traffic;
};
constinit PerThread<Watched> watched;

std::mutex watches_mutex;
int watches = 0, byte_watches = 0; // guarded by watches_mutex
at::CallbackHandle handle;         // the same
std::atomic<OperatorWatch::Count> counter = nullptr;
std::atomic<bool> counts_bytes = false;

/// Of such a call the kernel on the local parts is counted, which is a call of its own.
bool is_on_parts(c10::ArrayRef<c10::IValue> arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
    if (!argument.isTensor() || !argument.toTensor().defined()) return false;
    const auto keys = argument.toTensor().key_set();
    return keys.has(kDTensorKey) && !keys.has(kTouchKey);
  });
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& call) {
  auto& here = *watched;
  if (here.outer_product) return nullptr;
  Running one{.call = &call};
  one.work.flops = flops_of(call.name(), call.inputs());
  if (one.work.flops > 0) here.outer_product = &call;
  one.work.is_attention = is_attention(call.name());
  one.work.is_float8 = is_float8(call.name());
  one.is_on_parts = counts_bytes && is_on_parts(call.inputs());
  if (one.is_on_parts && !here.running.empty()) here.running.back().calls_on_parts = true;
  if (counts_bytes && !one.is_on_parts) {
    one.traffic = &here.traffic.of(call);
    one.work.bytes = argument_bytes(*one.traffic, call.inputs());
  }
  here.running.push_back(one);
  return nullptr;
}

void tell(const OperatorWork& work) {
  auto* const counts = watched->counts;
  if (!counts) return counter.load()(work);
  ++(work.is_on_parts ? counts->on_parts : counts->kernels);
}

/// One that has called others is counted by what these have done, unless it is a product.
void on_end(const at::RecordFunction& call, at::ObserverContext* /*context*/) {
  auto& here = *watched;
  auto& running = here.running;
  if (running.empty() || running.back().call != &call) return; // inside of a product, or begun before the watch
  auto ended = running.back();
  running.pop_back();
  if (here.outer_product == &call) here.outer_product = nullptr;
  if (ended.was_broken_off()) return; // as the last product of what is recomputed
  bool is_counted = ended.work.flops > 0;
  if (ended.traffic && (is_counted || !ended.is_counted_inside)) {
    ended.work.bytes += result_bytes(*ended.traffic, call.outputs());
    is_counted = is_counted || ended.traffic->moves;
  }
  if (is_counted) tell(ended.work);
  if (ended.is_on_parts && !ended.calls_on_parts) tell({.is_on_parts = true});
  if (!running.empty() && (is_counted || ended.is_counted_inside)) running.back().is_counted_inside = true;
}

} // namespace

OperatorWatch::OperatorWatch(Count count, bool bytes) : counts_bytes_(bytes) {
  const std::lock_guard lock(watches_mutex);
  counter = count;
  if (bytes) counts_bytes = ++byte_watches > 0;
  if (++watches > 1) return;
  handle = at::addGlobalCallback(
      at::RecordFunctionCallback(on_begin, on_end).needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
}

OperatorWatch::~OperatorWatch() {
  const std::lock_guard lock(watches_mutex);
  if (counts_bytes_) counts_bytes = --byte_watches > 0;
  if (--watches == 0) at::removeCallback(handle);
}

void forget_running_operator() {
  auto& here = *watched;
  if (here.running.empty()) return;
  auto& one = here.running.back();
  if (here.outer_product == one.call) here.outer_product = nullptr;
  one.work = {};
  one.traffic = nullptr;
}

OperatorCounts count_operators(const std::function<void()>& call) {
  const auto told = counter.load();
  const OperatorWatch watch(
      told ? told : [](const OperatorWork&) {}, /*counts_bytes=*/true);
  OperatorCounts counts;
  const ScopedValue<OperatorCounts*> scope(watched->counts, &counts);
  call();
  return counts;
}

} // namespace tessera::internal
