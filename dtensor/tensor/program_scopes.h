#pragma once

// Internal: the scopes that a program has opened around what runs now.

#include <c10/util/ThreadLocalDebugInfo.h>

#include <functional>

namespace tessera {
struct RedistributionRecord;
}

namespace tessera::internal {

struct RedistributionLog; // of debug.cpp
void add_record(RedistributionLog& log, RedistributionRecord record);

/// They hold in the thread that opened them, and in every backward that is called in them: autograd runs the backward of a
/// device's operators on a thread of its own, and carries LibTorch's debug information there.
struct ProgramScopes : c10::DebugInfoBase {
  bool implicit_replication = false, strict_sharding = false;
  RedistributionLog* log = nullptr;
};

const ProgramScopes& program_scopes();

/// Holds what `change` makes of the scopes around it, until the guard ends.
c10::DebugInfoGuard open_scope(const std::function<void(ProgramScopes&)>& change);

} // namespace tessera::internal
