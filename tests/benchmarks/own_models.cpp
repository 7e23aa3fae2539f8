// Models for own_models_test.py: one that works, and others that fail in each way that a program's own may.
//
//   own_models main --model works …     as bench_main
//   own_models run MATRIX FILE          as run_bench, with the text of a matrix; prints the report
//   own_models twice | unnamed | empty  registers models that cannot be
#include <common/program.h>
#include <tessera/benchmarks/bench.h>
#include <tessera/collectives/process_context.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace {

using tessera::BenchPlace;
using tessera::BenchRecipe;
using tessera::BenchSettings;
using Batch = std::vector<torch::Tensor>;
using Layer = torch::nn::Linear;

tessera::BenchModel make_model(const BenchSettings& settings) {
  Layer layer(settings.width, settings.width);
  return {layer.ptr(), {}, [layer](const Batch& batch) mutable { return layer->forward(batch[0]).square().mean(); }};
}

Batch make_batch(const BenchSettings& settings, const BenchPlace& place) {
  return {torch::full({settings.batch, settings.width}, 1.0 + static_cast<double>(place.rank))};
}

/// `works` with another model.
BenchRecipe with_model(tessera::BenchModel (*model)(const BenchSettings&)) { return {.model = model, .batch = make_batch}; }
/// `works` with other batches.
BenchRecipe with_batch(Batch (*batch)(const BenchSettings&, const BenchPlace&)) { return {.model = make_model, .batch = batch}; }

void add_bad_models(tessera::BenchModels& models) {
  models.add("nothing", with_model([](const BenchSettings&) { return tessera::BenchModel{}; }));
  models.add("detached", with_model([](const BenchSettings& settings) {
               auto model = make_model(settings);
               model.loss = [loss = model.loss](const Batch& batch) { return loss(batch).detach(); };
               return model;
             }));
  models.add("matrix", with_model([](const BenchSettings& settings) {
               auto model = make_model(settings);
               model.loss = [](const Batch& batch) { return batch[0]; };
               return model;
             }));
  models.add("stranger", with_model([](const BenchSettings& settings) {
               auto model = make_model(settings);
               model.blocks.push_back(Layer(2, 2).ptr());
               return model;
             }));
  models.add("rows", with_batch([](const BenchSettings& settings, const BenchPlace& place) -> Batch {
               return {torch::ones({settings.batch + place.rank, settings.width})};
             }));
  models.add("later", with_batch([](const BenchSettings& settings, const BenchPlace& place) -> Batch {
               return {torch::ones({settings.batch, settings.width}), torch::ones({place.step < 3 ? settings.batch : 1})};
             }));
  models.add("none", with_batch([](const BenchSettings&, const BenchPlace&) -> Batch { return {}; }));
  models.add("throws", with_batch([](const BenchSettings&, const BenchPlace& place) -> Batch {
               throw std::runtime_error("no data for rank " + std::to_string(place.rank));
             }));
  models.add("dies", with_batch([](const BenchSettings& settings, const BenchPlace& place) -> Batch {
               if (place.rank == 1 && place.step == 2) std::raise(SIGKILL);
               return make_batch(settings, place);
             }));
  models.add("leaves", with_batch([](const BenchSettings& settings, const BenchPlace& place) -> Batch {
               if (place.rank == 1 && place.step == 2) std::_Exit(0);
               return make_batch(settings, place);
             }));
}

int run(const tessera::BenchModels& models, const std::string& matrix, const std::string& file) {
  const auto report = tessera::run_bench(models, tessera::parse_bench_matrix(matrix, models), {.results = file});
  if (!report) return 0;
  std::printf("%s", report->to_string().c_str());
  return report->failed();
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("own_models", [&] {
    const std::string what = argc > 1 ? argv[1] : "";
    tessera::BenchModels models;
    if (what != "empty") models.add("works", {.model = make_model, .batch = make_batch});
    if (what == "twice") models.add("works", {.model = make_model, .batch = make_batch});
    if (what == "unnamed") models.add("", {.model = make_model, .batch = make_batch});
    add_bad_models(models);
    if (what == "run") return run(models, argv[2], argv[3]);
    return tessera::bench_main(argc, argv, what == "empty" ? tessera::BenchModels() : models, {.own_arguments = 1});
  });
}
