#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tessera/checkpoint/differing_tensors.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/checkpoint/storage.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::checkpoint {

struct SaveOptions {
  /// Replace a checkpoint that is already at the target, in one rename. Without it, an existing target is an error; with it, one
  /// that holds anything but a checkpoint's files.
  bool overwrite = false;
  /// Point the symbolic link `latest` beside `dir` at it, so that `load(state, root / "latest")` finds it. Anything else of that
  /// name is an error.
  bool update_latest = true;
  /// After a successful save, remove the oldest checkpoints beside `dir` until this many are left; 0 keeps all. Only those count
  /// whose names differ from `dir`'s in the last number alone ("stage0-step-100" and "stage0-step-200", not "stage1-step-100"),
  /// so a name without one is an error. What is no whole checkpoint of `save` stays.
  int keep_last = 0;
  /// What to keep of plain tensors whose values differ between ranks, the same on every rank; unset: what
  /// `set_differing_tensors` chose, or the lowest rank's with a warning.
  std::optional<DifferingTensors> differing_tensors = {};
  /// Only the ranks of this mesh call it, and the others go on: the replica that saves, the stages of a pipeline one by one. They
  /// must hold every tensor of `state` whole between them. Saves of meshes without a common rank may run at the same time, to
  /// different folders. Ranks outside the mesh that call it get an error, alone. Unset: every rank of the job.
  std::optional<DeviceMesh> mesh = {};
};

/// Writes `state` as a new folder `dir`; docs/checkpoint_format.md specifies it.
///
/// Every rank of the job (or of `SaveOptions::mesh`) calls it, with the same names (one process without a process group is a job
/// of one rank). Each rank writes the parts that it holds; replicated parts are written once; plain tensors and values by the
/// lowest rank that has them. A value that differs between ranks is an error, and so are sharded tensors of one name on different
/// meshes. The folder is written under a temporary name beside `dir`, synced to disk, and renamed after all ranks have succeeded:
/// `dir` appears whole or not at all. Its name may not be `latest` or begin with '.'. An error on any rank is an error on every
/// rank, and names the rank and the cause. Parent folders are created.
void save(const StateDict& state, const std::filesystem::path& dir, const SaveOptions& options = {});

/// The same into a storage, as the objects "<name>/…". Every rank gives its own Storage to the same objects. The index is written
/// last: a name without it is no checkpoint, and an error on any rank removes what the ranks wrote. With `overwrite` the new
/// index takes the place of the old one in one step, and the old data is removed after it. `update_latest` means nothing here.
/// Two jobs that save under one name at the same time are not told from each other.
void save(const StateDict& state, Storage& storage, const std::string& name, const SaveOptions& options = {});

/// The keys under which a Python program saved its state: `dcp.save({"model": …, "optimizer": …})` with the dicts that
/// `torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)` returns, flattened or not.
struct PythonKeys {
  std::string model = "model";         ///< of the model's state; empty where its names stand at the top
  std::string optimizer = "optimizer"; ///< of the optimizer's
};

struct LoadOptions {
  /// Leave entries that the checkpoint lacks as they are, instead of an error.
  bool allow_missing = false;
  /// Ignore what the checkpoint holds and `state` does not (for example, the optimizer when only weights are loaded), instead of
  /// an error.
  bool allow_unused = false;
  /// Check every byte read against its checksum, where the checkpoint has checksums.
  bool verify = true;
  /// Convert to the dtype of the state's tensors, instead of an error where the checkpoint's differ.
  bool cast = false;
  /// True for the names of the state that are loaded; unset: all. The others stay as they are, and what the checkpoint holds of
  /// them is no unused entry; nor is a name of the checkpoint that it refuses. Of what an optimizer, a schedule or a scaler
  /// keeps it accepts all or nothing.
  std::function<bool(const std::string&)> filter;
  /// The name in the checkpoint of a tensor of the state; unset: the same name. For weights that others named. It may throw for
  /// names that `filter` refuses.
  std::function<std::string(const std::string&)> rename;
  /// The checkpoint is a Python program's, and its optimizer's state and options are loaded too, by the names of parameters. With
  /// it `rename` says what Python calls a parameter or buffer, and the optimizer's entries follow. What only Python's optimizers
  /// have is passed over (foreach, fused, capturable, differentiable, initial_lr); `maximize` is an error, and so is the state of
  /// Adam for AdamW and the other way round. Integers become doubles where the state has a double, and the other way round where
  /// nothing is lost.
  std::optional<PythonKeys> python = {};
  /// Only the ranks of this mesh call it, as with SaveOptions::mesh. Every rank that holds a part, or a replica, of a tensor of
  /// `state` must be among them.
  std::optional<DeviceMesh> mesh = {};
};

/// What a load did: the names that `allow_missing` or `allow_unused` passed over, and how much it read.
struct LoadReport {
  std::vector<std::string> missing;
  std::vector<std::string> unused;
  int64_t bytes_read = 0; ///< of tensors, by this rank; whole blocks where they are verified
};

/// `dir` is a folder that `save` wrote, a Hugging Face folder (model.safetensors, or several files and
/// model.safetensors.index.json; nothing else in it is read), a folder of PyTorch's distributed checkpoint
/// (HuggingFaceStorageWriter or FileSystemWriter), one safetensors file, or one file of `save_torch`, of Python's torch.save or
/// of LibTorch's torch::save. Nothing in such a file is executed; what its dicts and modules hold has names with dots.
///
/// Reads the checkpoint `dir` into the tensors of `state`, in place, and its values into `state`; then hands optimizers their
/// state.
///
/// Every rank of the job (or of `LoadOptions::mesh`) calls it. The job may have any number of ranks, and the tensors any
/// placement, or none: each rank reads only the bytes that its parts need. Names, shapes and dtypes are compared before anything
/// is written; an error lists all that differ. Ranks that hold parts of one DTensor must load it alike. An error on any rank is
/// an error on every rank, and names the rank, the file and the tensor; after one while data is read (a wrong checksum, a
/// vanished file), the tensors hold a mixture of old and new values.
LoadReport load(StateDict& state, const std::filesystem::path& dir, const LoadOptions& options = {});
LoadReport load(StateDict&& state, const std::filesystem::path& dir, const LoadOptions& options = {});
/// The same from a storage: checkpoints that `save` wrote there.
LoadReport load(StateDict& state, const Storage& storage, const std::string& name, const LoadOptions& options = {});
LoadReport load(StateDict&& state, const Storage& storage, const std::string& name, const LoadOptions& options = {});

/// The newest complete checkpoint among the folders in `root`, by the time it was saved; empty when there is none. Folders of
/// others are passed over, and damaged ones that were written before it; a damaged index that was written later is an error.
/// Other processes may save and remove checkpoints meanwhile. Local.
std::filesystem::path latest(const std::filesystem::path& root);
/// The newest complete checkpoint among those of a storage whose names begin with `prefix`; empty when there is none. Reads the
/// index of each of them; a damaged one is an error.
std::string latest(const Storage& storage, const std::string& prefix = "");

/// Reads every byte of the checkpoint `dir` and compares it with its checksum (of folders that others wrote, the structure is
/// checked). Returns what is wrong, one line a finding that names the file and, in data, the tensor; nothing when the checkpoint
/// is whole. Local.
std::vector<std::string> verify(const std::filesystem::path& dir);
std::vector<std::string> verify(const Storage& storage, const std::string& name);

} // namespace tessera::checkpoint
