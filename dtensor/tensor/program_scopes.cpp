#include <tessera/dtensor/tensor/program_scopes.h>

#include <memory>

namespace tessera::internal {

namespace {
// A kind that LibTorch declares and uses for nothing.
constexpr auto kKind = c10::DebugInfoKind::INFERENCE_CONTEXT;
} // namespace

const ProgramScopes& program_scopes() {
  static const ProgramScopes none;
  const auto* const scopes = static_cast<const ProgramScopes*>(c10::ThreadLocalDebugInfo::get(kKind));
  return scopes ? *scopes : none;
}

c10::DebugInfoGuard open_scope(const std::function<void(ProgramScopes&)>& change) {
  auto scopes = std::make_shared<ProgramScopes>(program_scopes());
  change(*scopes);
  return c10::DebugInfoGuard(kKind, std::move(scopes));
}

} // namespace tessera::internal
