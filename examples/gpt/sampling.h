#pragma once

#include <string>

#include "gpt/model.h"

namespace gpt {

struct SamplingOptions {
  int64_t bytes = 256;
  double temperature = 0.8;
  uint64_t seed = 1;
};

/// `prompt` and `options.bytes` further bytes, drawn from the model one after another. Every rank calls it with the same
/// arguments and gets the same text.
std::string sample(Gpt& model, const std::string& prompt, torch::Device device, const SamplingOptions& options);

/// The text with every byte that is neither printable ASCII nor a line break replaced by '?'.
std::string printable(std::string text);

} // namespace gpt
