// A program for nccl_test: cuda_program SCENARIO --ranks n. It asks for CUDA in ways that a program may, and prints what it
// meets.
#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>
#include <tessera/mesh/device_mesh.h>

#include <unistd.h>
#include <cstdio>
#include <functional>
#include <map>
#include <numeric>
#include <string>

namespace {

void print_error_of(const std::function<void()>& call) {
  try {
    call();
    std::printf("no error\n");
  } catch (const c10::Error& error) {
    std::printf("%s\n", error.what_without_backtrace());
  }
  std::fflush(stdout);
}

void make_mesh() { tessera::init_device_mesh(at::kCUDA, {tessera::process_context().world_size()}); }

void connect() {
  std::vector<int64_t> ranks(tessera::process_context().world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  tessera::process_context().communicator(ranks, at::kCUDA);
}

bool is_last_rank() { return tessera::process_context().rank() == tessera::process_context().world_size() - 1; }

const std::map<std::string, std::function<void()>> kScenarios{
    {"makes_a_mesh", [] { print_error_of(make_mesh); }},
    {"makes_a_mesh_and_destroys",
     [] {
       print_error_of(make_mesh);
       tessera::destroy_process_group();
     }},
    {"connects", [] { print_error_of(connect); }},
    {"seeds_first",
     [] {
       at::manual_seed(0);
       print_error_of(make_mesh);
       std::printf("LibTorch has CUDA: %d\n", at::Context::hasCUDART());
     }},
    {"last_rank_does_not_connect",
     [] {
       if (!is_last_rank()) return connect();
       while (true) pause(); // until it is killed
     }},
    {"last_rank_ends_before_it_connects",
     [] {
       if (is_last_rank()) _exit(3);
       connect();
     }},
};

} // namespace

int main(int argc, char** argv) {
  const auto scenario = kScenarios.find(argc > 1 ? argv[1] : "");
  try {
    TORCH_CHECK(scenario != kScenarios.end(), "no such scenario");
    const auto ranks = tessera::ranks_from_args(argc, argv);
    return tessera::launch(ranks.value_or(1), [&] {
      tessera::init_process_group();
      scenario->second();
    });
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what_without_backtrace());
  }
  return 1;
}
