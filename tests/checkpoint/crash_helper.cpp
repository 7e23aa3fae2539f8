// Saves checkpoints until one rank, chosen by the seed, kills itself at a moment chosen by the seed.
//   checkpoint_crash_helper --ranks N ROOT SEED LONGEST_MICROSECONDS
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <random>
#include <thread>

namespace {

void save_until_killed(const std::filesystem::path& root, unsigned seed, int longest) {
  tessera::init_process_group();
  const int rank = tessera::process_context().rank();
  std::mt19937 generator(seed);
  const int victim = std::uniform_int_distribution<int>(0, tessera::process_context().world_size() - 1)(generator);
  const std::chrono::microseconds delay(std::uniform_int_distribution<int>(0, longest)(generator));
  for (int64_t step = 1;; ++step) {
    // Several files' worth of blocks, so that the moment may fall into each phase of a save.
    tessera::StateDict state;
    for (int i = 0; i < 3; ++i) {
      state.add("rank" + std::to_string(rank) + ".t" + std::to_string(i),
                at::full({300'000}, static_cast<double>(step), at::kFloat));
    }
    state.set("step", step);
    tessera::checkpoint::SaveOptions options;
    options.keep_last = 2;
    tessera::checkpoint::save(state, root / ("step-" + std::to_string(step)), options);
    if (rank == 0) {
      std::printf("saved %ld\n", static_cast<long>(step));
      std::fflush(stdout);
    }
    if (step == 1 && rank == victim) {
      std::thread([delay] {
        std::this_thread::sleep_for(delay);
        ::kill(::getpid(), SIGKILL);
      }).detach();
    }
  }
}

} // namespace

int main(int argc, char** argv) {
  try {
    const auto ranks = tessera::ranks_from_args(argc, argv);
    TORCH_CHECK(ranks && argc == 6, "usage: checkpoint_crash_helper --ranks N ROOT SEED LONGEST_MICROSECONDS");
    return tessera::launch(*ranks,
                           [&] { save_until_killed(argv[3], static_cast<unsigned>(std::stoul(argv[4])), std::stoi(argv[5])); });
  } catch (const std::exception&) {
    return 1;
  }
}
