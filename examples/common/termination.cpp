#include "common/termination.h"

#include <csignal>

namespace examples {
namespace {

volatile std::sig_atomic_t terminated = 0;

} // namespace

void note_termination() {
  std::signal(SIGTERM, [](int /*signal*/) { terminated = 1; });
}

bool is_terminated() { return terminated != 0; }

} // namespace examples
