#pragma once

#include <cstdint>
#include <string>

namespace examples {

/// Records what this rank does while it lives, for chrome://tracing and ui.perfetto.dev: operators, the ranges of Tessera with
/// the names of modules, and, in rows of their own, the collectives.
class StepTrace {
 public:
  StepTrace();
  ~StepTrace();
  StepTrace(const StepTrace&) = delete;
  StepTrace& operator=(const StepTrace&) = delete;

  /// Ends the recording and writes FOLDER/rank-<rank>.json. Makes the folder. Throws with the file and the cause where it cannot.
  void write(const std::string& folder);

 private:
  int64_t begin_ns_;
  bool is_recording_ = true;
};

} // namespace examples
