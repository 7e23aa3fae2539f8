#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>

#include <tessera/checkpoint/state_dict.h>

namespace tessera::checkpoint {

struct HuggingFaceOptions {
  /// A file holds at most this many bytes of data, but at least one tensor.
  int64_t max_file_bytes = 5'000'000'000;
  /// Convert floating-point tensors to this floating-point dtype.
  std::optional<at::ScalarType> dtype;
  /// Replace a folder that is already at the target, in one rename. Without it, an existing target is an error; with it, one that
  /// holds anything but a checkpoint's files, such as a tokenizer.
  bool overwrite = false;
};

/// Writes the tensors of `state` whole, as a Hugging Face folder: model.safetensors, or model-00001-of-0000n.safetensors and
/// model.safetensors.index.json. Of a tied tensor the first name is written.
///
/// Every rank of the job calls it. Each rank writes its own parts into the common files, so no rank holds more than it already
/// does. As with `save`, the folder appears whole or not at all, and an error on any rank is an error on every rank. A state with
/// values is an error.
void save_hugging_face(const StateDict& state, const std::filesystem::path& dir, const HuggingFaceOptions& options = {});

} // namespace tessera::checkpoint
