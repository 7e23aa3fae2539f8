#pragma once

// Internal: compares the tensors that a folder's files say they have with a model's parameters.

#include <filesystem>
#include <string>
#include <vector>

#include <tessera/plan/models/transformer_config.h>

namespace tessera::internal::models {

/// A tensor as Hugging Face's files have it.
struct FileTensor {
  std::string name;
  std::vector<int64_t> sizes;
};

/// What a file of the model has.
std::vector<FileTensor> file_tensors(const TransformerConfig& config);

/// Whether a folder holds safetensors.
bool has_weights(const std::filesystem::path& folder);

/// An error that names up to 20 tensors which are missing in the folder's safetensors, too many, or of another shape. Files may
/// leave out the prefix of all but the head, and have what such files have besides: masks, angles, the old names of norms, heads
/// of other tasks.
void check_weights(const TransformerConfig& config, const std::filesystem::path& folder);

} // namespace tessera::internal::models
