#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include <tessera/checkpoint/differing_tensors.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::checkpoint {

struct TorchFileOptions {
  /// True for the names that are written; unset: all.
  std::function<bool(const std::string&)> filter;
  /// Returns the name in the file for the name of an entry, the same on every rank; unset: the same name. Two names that become
  /// one are an error, and so is an empty name.
  std::function<std::string(const std::string&)> rename;
  /// Replace a file that is already at the target, in one rename. Without it, an existing target is an error.
  bool overwrite = false;
  /// Decides as in SaveOptions; `kEachRank` is an error, since the file holds a tensor once.
  std::optional<DifferingTensors> differing_tensors = {};
  /// Only the ranks of this mesh call it, as with SaveOptions::mesh.
  std::optional<DeviceMesh> mesh = {};
};

/// Writes `state` whole as one file for Python and for C++ (docs/checkpoint_format.md says how):
///   torch.load(file, weights_only=True) gives the names with their tensors and values, as a state dict;
///   torch::load(module, file) reads it into an unsharded module of LibTorch, with its submodules: those without tensors too, if
///   `state` is of `state_dict(module)`.
///
/// Every rank of the job (or of `TorchFileOptions::mesh`) calls it. Each rank writes its own parts into the common file, so no
/// rank holds more than it already does. Replicated tensors are written once; names of one tied tensor share its data. The file
/// appears whole or not at all: it is written in a hidden folder beside it, synced to disk, and renamed. Parent folders are
/// created. An error on any rank is an error on every rank. Errors: an entry whose name is also the first part of another name
/// ("a" and "a.b"), and a name that begins or ends with a dot or has two in a row. torch::load could not read these.
void save_torch(const StateDict& state, const std::filesystem::path& file, const TorchFileOptions& options = {});

} // namespace tessera::checkpoint
