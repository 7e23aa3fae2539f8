#pragma once

// Internal: one checkpoint into another, and two compared, tensor by tensor. By one process, without a process group.

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <tessera/checkpoint/formats/open.h>
#include <tessera/checkpoint/hugging_face.h>

namespace tessera::internal {

enum class Format { kTessera, kHuggingFace, kDistributed };

struct ConvertOptions {
  Format format = Format::kTessera;
  checkpoint::HuggingFaceOptions hugging_face; ///< `overwrite` counts for all formats, the rest for Hugging Face folders
  bool verify = true;
  /// Names that start with one of these are left out. A tied tensor stays under its others, and each rank's values of it under
  /// names after these.
  std::vector<std::string> exclude;
  /// Called with the bytes of data written since the last call.
  std::function<void(int64_t)> progress = [](int64_t) {};
};

/// Writes what `from` holds as a checkpoint at `to`. Needs memory for the largest tensor. Returns the names that were left out:
/// values, further names of tied tensors, and the copies of a tensor for each rank, which only our format holds.
std::vector<std::string> convert(const Opened& from, const std::filesystem::path& to, const ConvertOptions& options);

/// How two checkpoints differ, one line a finding: names that only one has, shapes, dtypes, values, and elements with how many
/// differ and by how much. Bits are compared. Reads at most 64 MiB of a tensor at a time; `progress` is called with the bytes
/// compared since the last call.
std::vector<std::string> differences(const Opened& a, const Opened& b, const std::function<void(int64_t)>& progress);

/// Bytes of data in all tensors.
int64_t data_bytes(const Index& index);

} // namespace tessera::internal
