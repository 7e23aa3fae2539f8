#include <tessera/collectives/start/thread_context.h>

#include <utility>

namespace tessera::internal {

namespace {

// A kind that LibTorch declares and uses for nothing.
constexpr auto kKind = c10::DebugInfoKind::PRODUCER_INFO;

struct ThreadContext final : c10::DebugInfoBase {
  explicit ThreadContext(std::shared_ptr<ProcessContext> own) : context(std::move(own)) {}
  std::shared_ptr<ProcessContext> context;
};

} // namespace

ProcessContext* thread_context() {
  const auto* const own = static_cast<ThreadContext*>(c10::ThreadLocalDebugInfo::get(kKind));
  return own ? own->context.get() : nullptr;
}

c10::DebugInfoGuard enter_context(std::shared_ptr<ProcessContext> context) {
  return c10::DebugInfoGuard(kKind, std::make_shared<ThreadContext>(std::move(context)));
}

} // namespace tessera::internal
