#include <tessera/collectives/counters.h>

#include <cstdio>

int main() {
  tessera::CollectiveCounters counters;
  counters.add(tessera::CollectiveKind::kAllGather, 8);
  std::printf("%s: %lld bytes\n", tessera::to_string(tessera::CollectiveKind::kAllGather),
              static_cast<long long>(counters.get(tessera::CollectiveKind::kAllGather).bytes));
  return counters.get(tessera::CollectiveKind::kAllGather).bytes == 8 ? 0 : 1;
}
