#pragma once

// Internal: what a choice of experts may ask for.

#include <cstdint>

#include <tessera/parallel/experts.h>

namespace tessera::internal::experts {

/// An error where the options do not fit so many experts.
void check_choice(const RouteOptions& options, int64_t experts);

} // namespace tessera::internal::experts
