#include "gpt/metrics.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace gpt {

void make_folder_of(const std::filesystem::path& path) {
  std::error_code error;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  TORCH_CHECK(!error, "cannot make the folder of ", path.string(), ": ", error.message());
}

std::ofstream open_for_writing(const std::string& path, bool append) {
  make_folder_of(path);
  std::ofstream file(path, std::ios::binary | (append ? std::ios::app : std::ios::trunc));
  TORCH_CHECK(file, "cannot write ", path, ": ", std::strerror(errno));
  return file;
}

JsonLog::JsonLog(const std::string& path, bool append) : path_(path) {
  if (!path.empty()) file_ = open_for_writing(path, append);
}

void JsonLog::run(const Options& options, int world, int64_t parameters, double unigram_entropy) {
  nlohmann::ordered_json record{
      {"kind", "run"}, {"ranks", world}, {"parameters", parameters}, {"unigram_entropy", unigram_entropy}};
  record["data"] = options.data;
  record["layers"] = options.model.layers;
  record["width"] = options.model.width;
  record["heads"] = options.model.heads;
  record["sequence"] = options.model.sequence;
  record["steps"] = options.steps;
  record["global_batch"] = options.rows_a_rank(world) * world;
  record["lr"] = options.learning_rate;
  record["seed"] = options.seed;
  record["strategy"] = to_string(options.strategy);
  record["layout"] = to_string(options.layout);
  record["precision"] = to_string(options.precision);
  record["reduce_precision"] = to_string(options.reduce_precision);
  write(record);
}

void JsonLog::step(const StepMetrics& metrics) {
  write({{"kind", "step"},
         {"step", metrics.step},
         {"loss", metrics.loss},
         {"lr", metrics.learning_rate},
         {"grad_norm", metrics.gradient_norm},
         {"tokens_per_second", metrics.tokens_per_second},
         {"resident_bytes", static_cast<int64_t>(metrics.resident_bytes)}});
}

void JsonLog::validation(int64_t step, double loss) { write({{"kind", "validation"}, {"step", step}, {"loss", loss}}); }

void JsonLog::end(int64_t step, double seconds, int64_t state_bytes) {
  write({{"kind", "end"}, {"step", step}, {"seconds", seconds}, {"state_bytes", state_bytes}});
}

// Flushed line by line: a run that is killed leaves the steps it did.
void JsonLog::write(const nlohmann::ordered_json& record) {
  if (!file_.is_open()) return;
  file_ << record.dump() << std::endl;
  TORCH_CHECK(file_, "cannot write the log ", path_, ": ", std::strerror(errno));
}

} // namespace gpt
