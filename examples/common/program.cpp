#include "common/program.h"

#include <c10/util/Exception.h>
#include <tessera/collectives/launch.h>

#include <cstdio>

namespace examples {

int run_program(const char* name, const std::function<int()>& body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
  }
  return 1;
}

int run_ranks(int ranks, const std::function<void()>& worker) {
  if (ranks > 0) return tessera::launch(ranks, worker);
  worker();
  return 0;
}

} // namespace examples
