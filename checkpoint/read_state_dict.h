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
  /// Only tensors and values whose names begin with it; empty: all.
  std::string prefix = {};
  /// Tensors become DTensors on this mesh, of which each rank reads its own part alone; unset: every rank reads plain tensors,
  /// whole, into the host's memory.
  std::optional<DeviceMesh> mesh = {};
  /// Where the elements lie on `mesh`, one a dim of it; empty: Shard(0) along every dim. Tensors without dims are replicated.
  Placements placements = {};
  /// As in LoadOptions.
  bool verify = true;
};

/// What the checkpoint `dir` holds, in new tensors of the dtypes and under the names that it has there: for a program that does
/// not know them. A tied tensor is one entry with aliases. Of a tensor that was saved for each rank, plain ones are this rank's.
///
/// Reads every format that `load` reads. Every rank of the mesh calls it, or of the job where none is given, with the same
/// options; an error on any rank is an error on every rank. Errors: those of `load`; placements without a mesh, or of another
/// number than the mesh has dims; a placement that a tensor of the checkpoint cannot have.
StateDict read_state_dict(const std::filesystem::path& dir, const ReadOptions& options = {});
/// The same of a checkpoint in a storage.
StateDict read_state_dict(const Storage& storage, const std::string& name, const ReadOptions& options = {});

} // namespace tessera::checkpoint
