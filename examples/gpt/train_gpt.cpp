// Trains a byte-level GPT whose parameters, gradients and optimizer state are sharded over ranks.
//
//   train_gpt --ranks 4                          starts 4 local ranks
//   torchrun --no-python --nproc-per-node 4 -- train_gpt
#include <tessera/collectives/process_context.h>

#include "common/program.h"
#include "common/ranks.h"
#include "gpt/options.h"
#include "gpt/training.h"

namespace {

void train(const gpt::Options& options) {
  examples::join_job(options.threads);
  gpt::Training(options).run();
  tessera::destroy_process_group();
}

int start(int argc, char** argv) {
  const auto options = gpt::parse_options(argc, argv);
  if (options.ranks > 0) gpt::check_world(options, options.ranks);
  return examples::run_ranks(options.ranks, [&] { train(options); });
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("train_gpt", [&] { return start(argc, argv); });
}
