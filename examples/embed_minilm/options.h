#pragma once

#include <cstdint>
#include <string>

#include "common/job_options.h"

namespace minilm {

/// What the command line says.
struct Options : examples::JobOptions {
  std::string model;  ///< folder with config.json, vocab.txt and model.safetensors
  std::string input;  ///< file with a sentence a line
  std::string output; ///< folder for the embeddings; empty: none
  int64_t batch = 0;  ///< sentences that a rank embeds at a time

  std::string pairs;        ///< file with two sentences a line to train on; empty: no training
  int64_t global_batch = 0; ///< pairs a step over all ranks
  int64_t steps = 0;
  double learning_rate = 0;
  uint64_t seed = 0;
  std::string save; ///< folder for the trained model; empty: none
  std::string log;  ///< file for the losses; empty: none
};

/// Reads the command line, as `gpt::parse_options` does.
Options parse_options(int argc, char** argv);

/// Throws when `options` do not fit a job of `world` ranks.
void check_world(const Options& options, int world);

} // namespace minilm
