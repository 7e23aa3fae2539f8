#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include <tessera/checkpoint/differing_tensors.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::checkpoint {

struct HuggingFaceOptions {
  /// The name of the file. Several are called `<stem>-00001-of-0000n.safetensors`, with `<file_name>.index.json`. For PEFT
  /// "adapter_model.safetensors".
  std::string file_name = "model.safetensors";
  /// True for the names that are written; unset: all.
  std::function<bool(const std::string&)> filter;
  /// Returns the name in the file for the name of a tensor, the same on every rank; unset: the same name. Two names that become
  /// one are an error, and so is an empty name.
  std::function<std::string(const std::string&)> rename;
  /// A file holds at most this many bytes of data, but at least one tensor.
  int64_t max_file_bytes = 5'000'000'000;
  /// Convert floating-point tensors to this floating-point dtype.
  std::optional<at::ScalarType> dtype;
  /// Replace weights of this `file_name` that are already in a folder at the target, in one rename. Without it they are an error.
  /// Other files in that folder, such as a configuration, a tokenizer or weights of another name, stay in either case; a folder
  /// in it is an error, and so is a checkpoint in another format. So are the current folder and a mount point, whatever they
  /// hold.
  bool overwrite = false;
  /// Decides as in SaveOptions; `kEachRank` is an error, since the format holds a tensor once.
  std::optional<DifferingTensors> differing_tensors = {};
  /// Only the ranks of this mesh call it, as with SaveOptions::mesh.
  std::optional<DeviceMesh> mesh = {};
};

/// Writes the tensors of `state` whole, as a Hugging Face folder: model.safetensors, or model-00001-of-0000n.safetensors and
/// model.safetensors.index.json. Of a tied tensor the first name is written.
///
/// Every rank of the job (or of `HuggingFaceOptions::mesh`) calls it. Each rank writes its own parts into the common files, so no
/// rank holds more than it already does. As with `save`, the folder appears whole or not at all, and an error on any rank is an
/// error on every rank. A value (not a tensor) that `filter` accepts is an error.
void save_hugging_face(const StateDict& state, const std::filesystem::path& dir, const HuggingFaceOptions& options = {});

} // namespace tessera::checkpoint
