// Prints the order of every schedule that can be made of 2 to 4 ranks, 1 to 12 micro-batches and 1 to 3 stages a rank, for
// pytorch_orders_test.py: a line a schedule, with its name, ranks, stages a rank, micro-batches, and the ranks' orders behind |.
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/parallel/pipeline_schedule.h>

#include <algorithm>

namespace {

void print_order(const tessera::PipelineScheduleName& kind, int64_t ranks, int64_t chunks, int64_t count) {
  try {
    auto text =
        tessera::to_csv(tessera::pipeline_schedule(kind.kind, {.ranks = ranks, .micro_batches = count, .chunks = chunks}));
    text.pop_back();
    std::replace(text.begin(), text.end(), '\n', '|');
    fmt::print("{} {} {} {} {}\n", kind.name, ranks, chunks, count, text);
  } catch (const c10::Error&) { // it has no such shape
  }
}

} // namespace

int main() {
  for (const auto& kind : tessera::pipeline_schedule_names()) {
    for (int64_t ranks = 2; ranks <= 4; ++ranks) {
      for (int64_t chunks = 1; chunks <= 3; ++chunks) {
        for (int64_t count = 1; count <= 12; ++count) print_order(kind, ranks, chunks, count);
      }
    }
  }
}
