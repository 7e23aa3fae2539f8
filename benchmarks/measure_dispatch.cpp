// What operators on DTensors cost beside the same operators on plain tensors, on one rank: warm calls, first calls, and AdamW
// steps. Driven by `benchmarks/compare` through standard input. Every answer is [plain, DTensor] in microseconds a call.
#include <ATen/ATen.h>
#include <common/program.h>
#include <common/ranks.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>

#include <chrono>
#include <cmath>

#include "median.h"
#include "serve.h"

namespace tessera::benchmarks {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Call = std::function<void(const Tensors&)>;

double microseconds(const std::function<void()>& call, int count) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) call();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / count;
}

/// The median of a few, after one that warms the caches.
double warm(const std::function<void()>& call, int count) {
  microseconds(call, count / 4 + 1);
  std::vector<double> values(5);
  for (auto& value : values) value = microseconds(call, count);
  return median(values);
}

nlohmann::json both(const Call& call, const Tensors& plain, const Tensors& sharded, int count) {
  return {warm([&] { call(plain); }, count), warm([&] { call(sharded); }, count)};
}

DeviceMesh mesh_of(int64_t dims) {
  std::vector<std::string> names;
  for (int64_t i = 0; i < dims; ++i) names.push_back("d" + std::to_string(i));
  return init_device_mesh(at::kCPU, std::vector<int64_t>(dims, 1), names);
}

/// First calls: shapes that no call had before.
class FirstCalls {
 public:
  nlohmann::json measure(int64_t dims, const Call& call) {
    const auto mesh = mesh_of(dims);
    std::vector<double> plain, sharded;
    for (int i = 0; i < 9; ++i) {
      const auto n = ++size_;
      const Tensors whole{at::randn({n, n}), at::randn({n, n})};
      const Tensors parts{distribute_tensor(whole[0], mesh, Placements(dims, Shard{0})),
                          distribute_tensor(whole[1], mesh, Placements(dims))};
      plain.push_back(microseconds([&] { call(whole); }, 1));
      sharded.push_back(microseconds([&] { call(parts); }, 1));
    }
    return {median(plain), median(sharded)};
  }

 private:
  int64_t size_ = 16;
};

/// The state of AdamW for many parameters.
struct State {
  Tensors parameters, gradients, averages, squares, steps;
};

State adamw_state(const DeviceMesh* mesh) {
  State state;
  const auto put = [&](const Tensor& whole) { return mesh ? Tensor(distribute_tensor(whole, *mesh, {Shard{0}})) : whole; };
  for (int i = 0; i < 300; ++i) {
    state.parameters.push_back(put(at::randn({32, 32})));
    state.gradients.push_back(put(at::randn({32, 32})));
    state.averages.push_back(put(at::zeros({32, 32})));
    state.squares.push_back(put(at::zeros({32, 32})));
    state.steps.push_back(at::ones({}));
  }
  return state;
}

void fused_step(State& s) {
  at::_fused_adamw_(s.parameters, s.gradients, s.averages, s.squares, {}, s.steps, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
}

void foreach_step(State& s) {
  at::_foreach_mul_(s.parameters, 1 - 1e-5);
  at::_foreach_lerp_(s.averages, s.gradients, 0.1);
  at::_foreach_mul_(s.squares, 0.999);
  at::_foreach_addcmul_(s.squares, s.gradients, s.gradients, 0.001);
  auto denominators = at::_foreach_sqrt(s.squares);
  at::_foreach_div_(denominators, std::sqrt(0.001));
  at::_foreach_add_(denominators, 1e-8);
  at::_foreach_addcdiv_(s.parameters, s.averages, denominators, -0.01);
}

/// The rows of each, spread over the mesh.
Tensors shard_rows(const Tensors& tensors, const DeviceMesh& mesh) {
  Tensors sharded;
  for (const auto& tensor : tensors) sharded.push_back(distribute_tensor(tensor, mesh, {Shard{0}}));
  return sharded;
}

void answer() {
  const auto mesh = mesh_of(1), grid = mesh_of(2);
  Tensors plain;
  for (int i = 0; i < 20; ++i) plain.push_back(at::randn({8, 8}));
  const auto sharded = shard_rows(plain, mesh);
  const auto on_grid = distribute_tensor(plain[0], grid, {Shard{0}, Shard{1}});
  auto plain_state = adamw_state(nullptr), sharded_state = adamw_state(&mesh);
  FirstCalls first;
  const auto warm_call = [&](int count, Call call) {
    return [&, count, call = std::move(call)]() -> nlohmann::json { return both(call, plain, sharded, count); };
  };
  const auto first_call = [&](int64_t dims, Call call) {
    return [&, dims, call = std::move(call)]() -> nlohmann::json { return first.measure(dims, call); };
  };
  const auto step = [&](void (*run)(State&)) {
    return [&, run]() -> nlohmann::json {
      const at::NoGradGuard no_grad; // as optimizers step
      return {warm([&] { run(plain_state); }, 5), warm([&] { run(sharded_state); }, 5)};
    };
  };
  Commands commands;
  commands["add"] = warm_call(2000, [](const Tensors& t) { t[0].add(t[1]); });
  commands["detach"] = warm_call(2000, [](const Tensors& t) { t[0].detach(); });
  commands["mm"] = warm_call(2000, [](const Tensors& t) { t[0].mm(t[1]); });
  commands["mul_"] = warm_call(2000, [](const Tensors& t) { t[0].mul_(t[1]); });
  commands["view"] = warm_call(2000, [](const Tensors& t) { t[0].view({4, 2, 8}); });
  commands["cat"] = warm_call(500, [](const Tensors& t) { at::cat(t); });
  commands["foreach_add"] = warm_call(500, [](const Tensors& t) { at::_foreach_add_(t, 1.0); });
  commands["redistribute"] = [&]() -> nlohmann::json {
    return {0.0, warm([&] { on_grid.redistribute({Replicate{}, Replicate{}}); }, 500)};
  };
  commands["first add"] = first_call(1, [](const Tensors& t) { t[0].add(t[1]); });
  for (int64_t dims = 1; dims <= 4; ++dims) {
    commands["first mm " + std::to_string(dims)] = first_call(dims, [](const Tensors& t) { t[0].mm(t[1]); });
  }
  commands["adamw fused"] = step(fused_step);
  commands["adamw foreach"] = step(foreach_step);
  serve(commands);
}

int run() {
  examples::join_job(/*threads=*/1);
  answer();
  destroy_process_group();
  return 0;
}

} // namespace
} // namespace tessera::benchmarks

int main() { return examples::run_program("measure_dispatch", tessera::benchmarks::run); }
