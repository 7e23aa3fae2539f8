#pragma once

// Internal: the load of a checkpoint that has been opened.

#include <functional>
#include <string>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/open.h>
#include <tessera/checkpoint/state/ranks.h>

namespace tessera::internal {

/// Reads what `open` gives into `state`, which it may add to, as `checkpoint::load` does. After an error `state` has the entries
/// that it had. Every rank of `ranks` calls it, and gets its own view of the same checkpoint from `open`. `step` is for errors,
/// and the same on every rank.
checkpoint::LoadReport load_opened(const Ranks& ranks, const std::string& step, const std::function<Opened()>& open,
                                   StateDict& state, const checkpoint::LoadOptions& options);

} // namespace tessera::internal
