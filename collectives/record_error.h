#pragma once

#include <exception>
#include <utility>

namespace tessera {

/// Writes the text of `error` and the time to the file that TORCHELASTIC_ERROR_FILE names, as Python's `@record` does: torchrun
/// sets the variable for each rank, and shows the text of the rank that failed first in its summary. Nothing happens where the
/// variable is not set. A file that is there already is replaced. A warning where it cannot be written. Local, never throws.
void record_error(const std::exception& error) noexcept;
/// The same of whatever was thrown.
void record_error(const std::exception_ptr& error) noexcept;

/// Returns what `run()` returns. What it throws is given to `record_error` and thrown again: `return tessera::record([&] { … });`
/// in `main` is Python's `@record` (torch.distributed.elastic.multiprocessing.errors).
template <typename Run>
auto record(Run&& run) -> decltype(std::forward<Run>(run)()) {
  try {
    return std::forward<Run>(run)();
  } catch (...) {
    record_error(std::current_exception());
    throw;
  }
}

} // namespace tessera
