#pragma once

// Internal: options that mean nothing.

#include <tessera/training/trainer_options.h>

namespace tessera::internal {

/// An error that names the option and its value.
void check_options(const TrainerOptions& options);

} // namespace tessera::internal
