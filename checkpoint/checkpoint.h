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
  /// whose names differ from `dir`'s in nothing but the last number ("stage0-step-100" and "stage0-step-200", not
  /// "stage1-step-100"), so a name without a number is an error. Other folders and damaged checkpoints stay.
  int keep_last = 0;
  /// What to save of plain tensors whose values differ between ranks. The same on every rank. Unset: the choice of
  /// `set_differing_tensors`, or the lowest rank's values with a warning.
  std::optional<DifferingTensors> differing_tensors = {};
  /// Only the ranks of this mesh call it, and the others do not wait: one replica saves, or the stages of a pipeline one by one.
  /// Together these ranks must hold every tensor of `state` completely. Saves of meshes without a common rank may run at the same
  /// time, to different folders. A rank outside the mesh that calls it gets an error; the others do not. Unset: every rank.
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

/// Saves into a storage, as the objects "<name>/…". Every rank gives its own Storage to the same objects. The index is written
/// last: a name without an index is not a checkpoint, and after an error on any rank the written data is removed. With
/// `overwrite` the new index replaces the old one in one step, and the old data is removed afterwards. `update_latest` has no
/// effect here. If two jobs save under one name at the same time, neither gets an error.
void save(const StateDict& state, Storage& storage, const std::string& name, const SaveOptions& options = {});

/// The keys under which a Python program saved its state: `dcp.save({"model": …, "optimizer": …})` with the dicts that
/// `torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)` returns, flattened or not.
struct PythonKeys {
  std::string model = "model";         ///< key of the model's state; empty if its names are at the top level
  std::string optimizer = "optimizer"; ///< key of the optimizer's state
};

struct LoadOptions {
  /// Leave entries that the checkpoint lacks as they are, instead of an error; so an optimizer keeps the state of a parameter
  /// that the checkpoint's optimizer did not have.
  bool allow_missing = false;
  /// Ignore what the checkpoint holds and `state` does not (for example, the optimizer when only weights are loaded), instead of
  /// an error.
  bool allow_unused = false;
  /// Check every byte read against its checksum, where the checkpoint has checksums.
  bool verify = true;
  /// Convert to the dtype of the state's tensors, instead of an error where the checkpoint's differ. An fp8 weight "x" whose
  /// scale "x_scale_inv" or "x_scale" would be left unused is an error even so.
  bool cast = false;
  /// True for the names of the state that are loaded; unset: all. The other tensors stay as they are. Entries of the checkpoint
  /// that the filter refuses do not count as unused. Of a tied tensor, only the names that it accepts are looked up. It must
  /// accept all entries of an optimizer, a schedule or a scaler, or none.
  std::function<bool(const std::string&)> filter;
  /// Returns the name in the checkpoint for the name of a tensor of the state; unset: the same name. For weights with other
  /// names. The state and options of an optimizer follow its parameters, whose names alone it is asked for: it must return the
  /// name of the parameter there. Several names may become one, but with `python`, where only the names of a tied parameter may.
  /// It may throw for names that `filter` refuses.
  std::function<std::string(const std::string&)> rename;
  /// The checkpoint is a Python program's, and its optimizer's state and options are loaded too, by the names of parameters. With
  /// it `rename` returns Python's name of a parameter or buffer, and the optimizer's entries are renamed with it. Options that
  /// only Python's optimizers have are ignored (foreach, fused, capturable, differentiable, initial_lr). `maximize` is an error,
  /// and so is the state of Adam for AdamW or the other way round. Integers become doubles if the state has a double, and doubles
  /// become integers if that loses nothing.
  std::optional<PythonKeys> python = {};
  /// Only the ranks of this mesh call it, as with SaveOptions::mesh. Every rank that holds a part, or a replica, of a tensor of
  /// `state` must be among them.
  std::optional<DeviceMesh> mesh = {};
};

/// What a load did: the names that `allow_missing` or `allow_unused` accepted, and how much it read.
struct LoadReport {
  std::vector<std::string> missing;
  std::vector<std::string> unused;
  int64_t bytes_read = 0; ///< bytes of tensors that this rank read; whole blocks if they are verified
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
/// vanished file, other values for each name of a tied tensor), the tensors hold a mixture of old and new values. The entries of
/// `state` change only where the load succeeds.
LoadReport load(StateDict& state, const std::filesystem::path& dir, const LoadOptions& options = {});
LoadReport load(StateDict&& state, const std::filesystem::path& dir, const LoadOptions& options = {});
/// Loads from a storage a checkpoint that `save` wrote there.
LoadReport load(StateDict& state, const Storage& storage, const std::string& name, const LoadOptions& options = {});
LoadReport load(StateDict&& state, const Storage& storage, const std::string& name, const LoadOptions& options = {});

/// The newest complete checkpoint among the folders in `root`, by the time it was saved; empty when there is none. Folders of
/// others are ignored, and so are damaged checkpoints that were written before it. A damaged index that was written later is an
/// error. Other processes may save and remove checkpoints meanwhile. Local.
std::filesystem::path latest(const std::filesystem::path& root);
/// The newest complete checkpoint among those of a storage whose names begin with `prefix`; empty when there is none. Reads the
/// index of each of them. Other objects with the name of an index are ignored, and so are damaged indexes whose data is older. A
/// damaged index whose data is newer, or that has no data, is an error.
std::string latest(const Storage& storage, const std::string& prefix = "");

/// Reads every byte of the checkpoint `dir` and compares it with its checksum (of folders that others wrote, the structure is
/// checked). Returns what is wrong, one line a finding that names the file and, in data, the tensor; nothing when the checkpoint
/// is whole. Local.
std::vector<std::string> verify(const std::filesystem::path& dir);
std::vector<std::string> verify(const Storage& storage, const std::string& name);

} // namespace tessera::checkpoint
