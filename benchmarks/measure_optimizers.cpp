// Steps of optimizers on one rank: on one large shard, beside ATen's fused kernel on plain tensors and a sweep of the same
// memory; on 300 small parameters; and of each optimizer. Driven by `benchmarks/compare` through standard input.
#include <ATen/Parallel.h>
#include <common/program.h>
#include <common/ranks.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "median.h"
#include "serve.h"

namespace tessera::benchmarks {
namespace {

using at::Tensor;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using Make = std::function<OptimizerPtr(const std::vector<Tensor>&)>;

constexpr int64_t kLarge = int64_t{32} << 20; ///< elements of the large shard
constexpr int64_t kRows = 4096;

double seconds(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// The medians of calls that take turns, after one that warms the caches.
nlohmann::json in_turns(const std::vector<std::function<void()>>& calls, int rounds) {
  std::vector<std::vector<double>> times(calls.size());
  for (int round = -1; round < rounds; ++round) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const double time = seconds(calls[i]);
      if (round >= 0) times[i].push_back(time);
    }
  }
  nlohmann::json medians;
  for (const auto& each : times) medians.push_back(median(each));
  return medians;
}

/// One group, fully sharded over one rank, with gradients.
std::vector<Tensor> sharded_parameters(int64_t count, int64_t rows, int64_t columns) {
  torch::nn::ModuleList layers;
  for (int64_t i = 0; i < count; ++i) layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(columns, rows).bias(false)));
  const auto mesh = init_device_mesh(at::kCPU, {1});
  fully_shard(*layers, mesh);
  const torch::NoGradGuard no_grad;
  auto parameters = layers->parameters();
  for (auto& parameter : parameters)
    parameter.mutable_grad() =
        distribute_tensor(torch::full({rows, columns}, 1e-3), mesh, DTensor(parameter).spec().placements());
  return parameters;
}

std::vector<Tensor> plain_parameters(int64_t count, int64_t rows, int64_t columns) {
  std::vector<Tensor> parameters;
  for (int64_t i = 0; i < count; ++i) {
    parameters.push_back(torch::randn({rows, columns}).requires_grad_());
    parameters.back().mutable_grad() = torch::full({rows, columns}, 1e-3);
  }
  return parameters;
}

/// Reads four arrays and writes three of them in place, as a step of AdamW does, with next to no arithmetic.
void sweep(const std::vector<Tensor>& arrays) {
  auto *a = arrays[0].data_ptr<float>(), *b = arrays[1].data_ptr<float>(), *c = arrays[2].data_ptr<float>();
  const auto* d = arrays[3].const_data_ptr<float>();
  at::parallel_for(0, arrays[0].numel(), 1 << 16, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float with = d[i];
      a[i] += with;
      b[i] += with;
      c[i] += with;
    }
  });
}

/// Seconds of: FusedAdamW on the flat shard, ATen's kernel on plain tensors, the sweep.
nlohmann::json large_step(int rounds) {
  const auto sharded = sharded_parameters(1, kRows, kLarge / kRows), plain = plain_parameters(1, kRows, kLarge / kRows);
  FusedAdamW optimizer(sharded, torch::optim::AdamWOptions(1e-4));
  const std::vector<Tensor> averages{torch::zeros_like(plain[0])}, squares{torch::zeros_like(plain[0])}, steps{torch::ones({})};
  std::vector<Tensor> arrays;
  for (int i = 0; i < 4; ++i) arrays.push_back(torch::zeros({kLarge}));
  const torch::NoGradGuard no_grad;
  const std::vector<Tensor> values{plain[0].detach()}, gradients{plain[0].grad()};
  return in_turns(
      {[&] { optimizer.step(); },
       [&] { at::_fused_adamw_(values, gradients, averages, squares, {}, steps, 1e-4, 0.9, 0.999, 0.01, 1e-8, false, false); },
       [&] { sweep(arrays); }},
      rounds);
}

/// Seconds of: a step on plain parameters and on sharded ones, and clipping of both.
nlohmann::json small_steps(int rounds) {
  constexpr int64_t kCount = 300, kSide = 32;
  constexpr double kLimit = 1e-3; // of the norm: gradients are made smaller each time
  const auto sharded = sharded_parameters(kCount, kSide, kSide), plain = plain_parameters(kCount, kSide, kSide);
  FusedAdamW on_sharded(sharded, torch::optim::AdamWOptions(1e-4)), on_plain(plain, torch::optim::AdamWOptions(1e-4));
  return in_turns({[&] { on_plain.step(); }, [&] { on_sharded.step(); }, [&] { clip_grad_norm_(plain, kLimit); },
                   [&] { clip_grad_norm_(sharded, kLimit); }},
                  rounds);
}

template <typename Optimizer, typename Options>
Make maker(const Options& options) {
  return [options](const std::vector<Tensor>& parameters) { return std::make_unique<Optimizer>(parameters, options); };
}

OptimizerPtr make_rounded(const std::vector<Tensor>& parameters) {
  auto optimizer = std::make_unique<FusedAdamW>(parameters, torch::optim::AdamWOptions(1e-4));
  optimizer->keep_moments_in(MomentDtype::kBFloat16);
  return optimizer;
}

/// Every optimizer of the library, in its usual use.
const std::vector<std::pair<std::string, Make>>& optimizers() {
  namespace optim = torch::optim;
  static const std::vector<std::pair<std::string, Make>> all{
      {"torch::optim::AdamW", maker<optim::AdamW>(optim::AdamWOptions(1e-4))},
      {"FusedAdamW", maker<FusedAdamW>(optim::AdamWOptions(1e-4))},
      {"FusedAdamW, moments in bf16", make_rounded},
      {"AdamW8bit", maker<AdamW8bit>(AdamW8bitOptions(1e-4))},
      {"FusedSGD with momentum", maker<FusedSGD>(optim::SGDOptions(1e-4).momentum(0.9))},
      {"FusedAdagrad", maker<FusedAdagrad>(optim::AdagradOptions(1e-4))},
      {"Lion", maker<Lion>(LionOptions(1e-4))},
      {"Lamb", maker<Lamb>(LambOptions(1e-4))},
      {"Adafactor", maker<Adafactor>(AdafactorOptions(1e-4))},
      {"Muon", maker<Muon>(MuonOptions(1e-4))}};
  return all;
}

/// Nanoseconds an element of a step of each optimizer, on 16 matrices of 512 × 512.
nlohmann::json each_step(int rounds) {
  constexpr int64_t kCount = 16, kSide = 512;
  std::vector<OptimizerPtr> made;
  std::vector<std::function<void()>> calls;
  for (const auto& [name, make] : optimizers()) {
    made.push_back(make(sharded_parameters(kCount, kSide, kSide)));
    calls.emplace_back([optimizer = made.back().get()] { optimizer->step(); });
  }
  const auto medians = in_turns(calls, rounds);
  nlohmann::json answer;
  for (size_t i = 0; i < calls.size(); ++i)
    answer[optimizers()[i].first] = 1e9 * medians[i].get<double>() / static_cast<double>(kCount * kSide * kSide);
  return answer;
}

int run() {
  examples::join_job(/*threads=*/1);
  Commands commands;
  commands["large"] = [] { return large_step(11); };
  commands["large, quick"] = [] { return large_step(2); };
  commands["small"] = [] { return small_steps(200); };
  commands["each"] = [] { return each_step(7); };
  commands["each, quick"] = [] { return each_step(1); };
  serve(commands);
  destroy_process_group();
  return 0;
}

} // namespace
} // namespace tessera::benchmarks

int main() { return examples::run_program("measure_optimizers", tessera::benchmarks::run); }
