#include <ATen/ops/ones.h>
#include <tessera/benchmarks/bench.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>

// Measures a layer on one rank and on two, which are this program again; fails unless both cases end well.
int main() {
  tessera::BenchModels models;
  models.add("linear",
             {.model = [](const tessera::BenchSettings& settings) -> tessera::BenchModel {
                torch::nn::Linear layer(settings.width, settings.width);
                return {layer.ptr(), {}, [layer](const std::vector<at::Tensor>& batch) mutable {
                          return layer->forward(batch[0]).square().mean();
                        }};
              },
              .batch = [](const tessera::BenchSettings& settings, const tessera::BenchPlace&) -> std::vector<at::Tensor> {
                return {at::ones({settings.batch, settings.width})};
              }});
  const auto matrix =
      tessera::parse_bench_matrix(R"({"product": {"ranks": [1, 2]}, "common": {"width": 8, "steps": 2}})", models);
  const auto report = tessera::run_bench(models, matrix, {.results = "bench.json"});
  if (!report) return 0; // a process of a case
  std::printf("%s", report->to_string().c_str());
  return report->results.size() == 2 && report->failed() == 0 ? 0 : 1;
}
