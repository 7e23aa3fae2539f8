#pragma once

#include <c10/core/Stream.h>
#include <tessera/fsdp/buffers/side_stream.h>

#include <optional>
#include <string>
#include <vector>

#include <tessera/tests/support/draw.h>

namespace tessera::testing::scripts {

/// The streams that a script's program computes on. Some programs have several, and change between their actions; on the CPU
/// there are none.
class ProgramStreams {
 public:
  ProgramStreams() = default; ///< none
  explicit ProgramStreams(uint64_t seed);

  /// Runs `action` on one of them, drawn from `seed`. What comes before is before it, and what comes after is after it, on any of
  /// the streams.
  template <typename Action>
  void run(uint64_t seed, const Action& action) const {
    const internal::StreamScope scope(choose(seed));
    action();
  }
  std::string description() const;

 private:
  std::optional<c10::Stream> choose(uint64_t seed) const;

  std::vector<c10::Stream> streams_;
};

} // namespace tessera::testing::scripts
