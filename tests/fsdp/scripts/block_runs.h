#pragma once

#include <string>

#include <tessera/tests/fsdp/scripts/random_model.h>

namespace tessera::testing::scripts {

/// A way to run the blocks of a sharded model, which changes no number.
struct BlockRun {
  std::string name; ///< empty: as on the unsharded side
  RunBlock run;
};

/// With a boundary around each forward. If the backward follows `at_once`, also with what autograd saves elsewhere, which a write
/// in between might not reach, or once more in backward. No `tessera::call`, which casts, unless it `may_call`.
BlockRun random_run(Draw& draw, bool at_once, bool may_call);

} // namespace tessera::testing::scripts
