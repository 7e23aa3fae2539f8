#pragma once

#include <tessera/benchmarks/bench.h>

#include <nlohmann/json.hpp>

namespace tessera::benchmarks {

/// What `explain` says of a step of the case before one has run: of the model on the meta device, sharded over ranks that do not
/// exist, with the activations that one forward of the model on one or two rows keeps here, in proportion to the rows. Where
/// blocks are recomputed, a block's inner activations come on top. It needs memory for the whole parameters once. With a limit of
/// memory also how many rows fit, up to those of the case, and the peaks of one row, two, and so on, up to a thousand.
nlohmann::ordered_json predict(const BenchSettings& settings, const BenchRecipe& recipe);

} // namespace tessera::benchmarks
