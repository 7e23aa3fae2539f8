#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "gpt/options.h"

namespace gpt {

/// What one training step measured; `loss` and `resident_bytes` are means over the ranks.
struct StepMetrics {
  int64_t step = 0; ///< counted from 1
  double loss = 0;  ///< of the batch, before the step; nats a byte
  double learning_rate = 0;
  double gradient_norm = 0; ///< global, before clipping
  double tokens_per_second = 0;
  double resident_bytes = 0;
};

/// A file of JSON objects, one a line, each with a "kind": "run" first, then "step" and "validation", and "end".
/// Numbers have as many digits as it takes to read the same double back.
class JsonLog {
 public:
  /// No file for an empty path. Makes the folder of the file; `append` keeps what the file holds.
  JsonLog(const std::string& path, bool append);

  void run(const Options& options, int world, int64_t parameters, double unigram_entropy);
  void step(const StepMetrics& metrics);
  void validation(int64_t step, double loss);
  void end(int64_t step, double seconds, int64_t state_bytes);

 private:
  void write(const nlohmann::ordered_json& record);

  std::string path_;
  std::ofstream file_;
};

/// Makes the folders above `path`; throws with the cause when it cannot.
void make_folder_of(const std::filesystem::path& path);

/// Opens `path` for writing and makes its folder; throws with the cause when it cannot.
std::ofstream open_for_writing(const std::string& path, bool append = false);

} // namespace gpt
