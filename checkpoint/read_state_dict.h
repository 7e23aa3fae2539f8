#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include <tessera/checkpoint/state_dict.h>
#include <tessera/checkpoint/storage.h>
#include <tessera/dtensor/placement.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::checkpoint {

struct ReadOptions {
  /// Only tensors and values are read whose names begin with it; empty: all.
  std::string prefix = {};
  /// Tensors become DTensors on this mesh, of which each rank reads only its own part. Unset: every rank reads whole plain
  /// tensors into the host's memory.
  std::optional<DeviceMesh> mesh = {};
  /// One placement for each dim of `mesh`; empty: Shard(0) along every dim. Tensors without dims are replicated.
  Placements placements = {};
  /// Checks the data as `LoadOptions::verify` does.
  bool verify = true;
};

/// Reads the checkpoint `dir` into new tensors, with the names and dtypes of the checkpoint: for a program that does not know
/// them. A tied tensor is one entry with aliases. For a tensor that was saved for each rank, a plain result has this rank's
/// values.
///
/// Reads every format that `load` reads. Every rank of the mesh, or of the job without a mesh, calls it with the same
/// options. An error on any rank is an error on every rank. Errors: those of `load`; placements without a mesh, or of another
/// number than the mesh has dims; a placement that a tensor of the checkpoint cannot have.
StateDict read_state_dict(const std::filesystem::path& dir, const ReadOptions& options = {});
/// Reads a checkpoint in a storage.
StateDict read_state_dict(const Storage& storage, const std::string& name, const ReadOptions& options = {});

} // namespace tessera::checkpoint
