#pragma once

// What the steps with several ranks share: each rank's part of a batch, the mean of a loss, and `main`.

#include <tessera/tessera.h>

#include <cstdio>
#include <functional>
#include <string_view>
#include <utility>

#include "tutorial/model.h"

namespace tutorial {

/// This rank's rows of the batch.
inline std::pair<torch::Tensor, torch::Tensor> share_of_batch(int64_t step, const tessera::DeviceMesh& mesh) {
  const auto [x, y] = batch(step);
  const auto ranks = mesh.size(), rank = static_cast<int64_t>(tessera::process_context().rank());
  TORCH_CHECK(kBatch % ranks == 0, "the batch of ", kBatch, " rows cannot be shared evenly by ", ranks, " ranks");
  return {x.chunk(ranks)[rank], y.chunk(ranks)[rank]};
}

/// Prints the mean of the ranks' losses every ten steps. Every rank of the mesh calls it.
inline void report(int64_t step, const torch::Tensor& loss, const tessera::DeviceMesh& mesh) {
  if (step % 10 != 9) return;
  const tessera::Placements mean(static_cast<size_t>(mesh.ndim()), tessera::Partial{tessera::Partial::Op::kAvg});
  const auto whole = tessera::DTensor(tessera::from_local(loss.detach(), mesh, mean)).full_tensor();
  if (tessera::process_context().rank() != 0) return;
  std::printf("step %2ld  loss %.4f\n", static_cast<long>(step + 1), whole.item<double>());
  std::fflush(stdout);
}

/// An error for anything but `--ranks n` or `--ranks=n`.
inline void check_arguments(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument(argv[i]);
    const bool has_number_next = argument == "--ranks";
    TORCH_CHECK(has_number_next || argument.starts_with("--ranks="), "the argument ", argument, " is unknown; usage: ", argv[0],
                " [--ranks n]");
    if (has_number_next) ++i;
  }
}

/// Runs `worker` on the local ranks that `--ranks n` asks for, and otherwise as the rank that torchrun or Slurm started.
inline int run(int argc, char** argv, const std::function<void()>& worker) {
  try {
    check_arguments(argc, argv);
    if (const auto ranks = tessera::ranks_from_args(argc, argv)) return tessera::launch(*ranks, worker);
    worker();
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  }
}

} // namespace tutorial
