#pragma once

#include <exception>
#include <functional>
#include <utility>

namespace tessera {

/// Writes the text of `error` and the time to the file that TORCHELASTIC_ERROR_FILE names, as Python's `@record` does: torchrun
/// sets the variable for each rank, and shows the text of the rank that failed first in its summary. Nothing happens where the
/// variable is not set. A file that is there already is replaced. A warning where it cannot be written. Local, never throws.
void record_error(const std::exception& error) noexcept;
/// The same of whatever was thrown.
void record_error(const std::exception_ptr& error) noexcept;

/// Returns what `run()` returns. What it throws is given to `record_error` and thrown again, as by Python's `@record`
/// (torch.distributed.elastic.multiprocessing.errors). A `main` that nothing catches it in ends as C++ programs do then, by
/// SIGABRT: `run_main` returns a status.
template <typename Run>
auto record(Run&& run) -> decltype(std::forward<Run>(run)()) {
  try {
    return std::forward<Run>(run)();
  } catch (...) {
    record_error(std::current_exception());
    throw;
  }
}

/// Runs a whole program, as in `return tessera::run_main([&] { … });` in `main`, and returns the status that `run` returns, or 1
/// where it throws. The text of the error is given to `record_error`, and logged as LibTorch logs errors, on standard error.
int run_main(const std::function<int()>& run) noexcept;

} // namespace tessera
