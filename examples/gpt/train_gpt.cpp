// Trains a byte-level GPT whose parameters, gradients and optimizer state are sharded over ranks.
//
//   train_gpt --ranks 4                          starts 4 local ranks
//   torchrun --no-python --nproc-per-node 4 -- train_gpt
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>

#include <cstdio>

#include "gpt/options.h"
#include "gpt/ranks.h"
#include "gpt/trainer.h"

namespace {

void train(const gpt::Options& options) {
  gpt::join_job(options.threads);
  gpt::Trainer(options).run();
  tessera::destroy_process_group();
}

int start(int argc, char** argv) {
  const auto options = gpt::parse_options(argc, argv);
  if (options.ranks == 0) {
    train(options);
    return 0;
  }
  gpt::check_world(options, options.ranks);
  return tessera::launch(options.ranks, [&] { train(options); });
}

} // namespace

int main(int argc, char** argv) {
  try {
    return start(argc, argv);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
  }
  return 1;
}
