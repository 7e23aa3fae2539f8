#include "gpt/metrics.h"

#include <nlohmann/json.hpp>

namespace gpt {

void JsonLog::run(const Options& options, int world, int64_t parameters, double unigram_entropy) {
  nlohmann::ordered_json record{
      {"kind", "run"}, {"ranks", world}, {"parameters", parameters}, {"unigram_entropy", unigram_entropy}};
  record["data"] = options.data;
  record["layers"] = options.model.layers;
  record["width"] = options.model.width;
  record["heads"] = options.model.heads;
  record["sequence"] = options.model.sequence;
  record["steps"] = options.steps;
  record["global_batch"] = options.rows_a_rank(world) * options.data_ranks(world);
  record["context_ranks"] = options.context_ranks;
  if (options.context_ranks > 1) record["context"] = tessera::to_string(options.context);
  record["lr"] = options.learning_rate;
  record["seed"] = options.seed;
  record["strategy"] = to_string(options.strategy);
  record["layout"] = to_string(options.layout);
  record["precision"] = to_string(options.precision);
  record["reduce_precision"] = to_string(options.reduce_precision);
  lines_.write(record);
}

void JsonLog::step(const StepMetrics& metrics) {
  lines_.write({{"kind", "step"},
                {"step", metrics.step},
                {"loss", metrics.loss},
                {"lr", metrics.learning_rate},
                {"grad_norm", metrics.gradient_norm},
                {"tokens_per_second", metrics.tokens_per_second},
                {"resident_bytes", static_cast<int64_t>(metrics.resident_bytes)}});
}

void JsonLog::validation(int64_t step, double loss) { lines_.write({{"kind", "validation"}, {"step", step}, {"loss", loss}}); }

void JsonLog::end(int64_t step, double seconds, int64_t state_bytes) {
  lines_.write({{"kind", "end"}, {"step", step}, {"seconds", seconds}, {"state_bytes", state_bytes}});
}

} // namespace gpt
