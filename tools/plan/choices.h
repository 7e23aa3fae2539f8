#pragma once

#include <tessera/plan/search.h>
#include <tessera/plan/settings.h>

#include <cstdint>

namespace tools {

/// What the flags ask the search to choose among, on so many ranks. Errors name the flag.
tessera::SearchOptions search_options(int64_t ranks);

/// Bytes that --budget gives a rank; 0: as many as the machine has.
int64_t budget_of_flags();

/// The one setting that the flags say, of so many ranks. What --mesh leaves of them shards, or without sharding replicates.
tessera::PlanSettings settings_of_flags(int64_t ranks);

} // namespace tools
