// What the DTensor dispatch costs over the plain operator, on one rank: nanoseconds a call.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/dispatch/fallback.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

namespace {

double nanoseconds(const std::function<void()>& call, int count) {
  double best = 1e300;
  for (int i = 0; i < count / 10; ++i) call();
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) call();
    best = std::min(best, std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / count);
  }
  return best;
}

void compare(const char* name, int count, const std::function<void(const std::vector<at::Tensor>&)>& run,
             const std::vector<at::Tensor>& plain, const std::vector<at::Tensor>& sharded) {
  const double base = nanoseconds([&] { run(plain); }, count), ours = nanoseconds([&] { run(sharded); }, count);
  std::printf("%-24s plain %9.0f  dtensor %9.0f  over %9.0f ns\n", name, base, ours, ours - base);
}

} // namespace

int main() {
  at::set_num_threads(1);
  tessera::init_process_group();
  const auto mesh = tessera::init_device_mesh(at::kCPU, {1}, {"shard"});
  std::vector<at::Tensor> plain, sharded;
  for (int i = 0; i < 20; ++i) {
    plain.push_back(at::randn({8, 8}));
    sharded.push_back(tessera::distribute_tensor(plain.back(), mesh, {tessera::Shard{0}}));
  }
  using List = const std::vector<at::Tensor>&;
  for (const bool grad : {false, true}) {
    std::printf("%s\n", grad ? "grad mode" : "no_grad");
    at::AutoGradMode mode(grad);
    compare(
        "add", 100000, [](List t) { t[0].add(t[1]); }, plain, sharded);
    compare(
        "detach", 100000, [](List t) { t[0].detach(); }, plain, sharded);
    compare(
        "mul_ (scalar)", 100000, [](List t) { t[0].mul_(1.0); }, plain, sharded);
    compare(
        "mul_ (tensor)", 100000, [](List t) { t[0].mul_(t[1]); }, plain, sharded);
    compare(
        "addcdiv_", 100000, [](List t) { t[0].addcdiv_(t[1], t[2], 0.0); }, plain, sharded);
    compare(
        "mm", 100000, [](List t) { t[0].mm(t[1]); }, plain, sharded);
    compare(
        "view", 100000,
        [](List t) {
          t[0].view({4, 2, 8});
        },
        plain, sharded);
    compare(
        "t", 100000, [](List t) { t[0].t(); }, plain, sharded);
    compare(
        "sum", 100000, [](List t) { t[0].sum(); }, plain, sharded);
    compare(
        "cat of 20", 20000, [](List t) { at::cat(t); }, plain, sharded);
    compare(
        "_foreach_add_ x 20", 20000, [](List t) { at::_foreach_add_(t, 1.0); }, plain, sharded);
  }
  const auto statistics = tessera::dispatch::cache_statistics();
  std::printf("cache: %lu hits, %lu misses, %zu entries\n", statistics.hits, statistics.misses, statistics.entries);
}
