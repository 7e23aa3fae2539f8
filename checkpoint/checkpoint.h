#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <tessera/checkpoint/state_dict.h>

namespace tessera::checkpoint {

struct SaveOptions {
  /// Replace a checkpoint that is already at the target, in one rename. Without it, an existing target is an error; with it, one
  /// that holds anything but a checkpoint's files.
  bool overwrite = false;
  /// Point the symbolic link `latest` beside `dir` at it, so that `load(state, root / "latest")` finds it. Anything else of that
  /// name is an error.
  bool update_latest = true;
  /// After a successful save, remove the oldest checkpoints beside `dir` until this many are left; 0 keeps all. What is no whole
  /// checkpoint of `save` stays.
  int keep_last = 0;
};

/// Writes `state` as a new folder `dir`; docs/checkpoint_format.md specifies it.
///
/// Every rank of the job calls it, with the same names (one process without a process group is a job of one rank). Each rank
/// writes the parts that it holds; replicated parts are written once; plain tensors and values by the lowest rank that has them.
/// A value that differs between ranks is an error. The folder is written under a temporary name beside `dir`, synced to disk, and
/// renamed after all ranks have succeeded: `dir` appears whole or not at all. Its name may not be `latest` or begin with '.'. An
/// error on any rank is an error on every rank, and names the rank and the cause. Parent folders are created.
void save(const StateDict& state, const std::filesystem::path& dir, const SaveOptions& options = {});

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
  /// The name in the checkpoint of a tensor of the state; unset: the same name. For weights that others named.
  std::function<std::string(const std::string&)> rename;
};

/// What a load did: the names that `allow_missing` or `allow_unused` passed over, and how much it read.
struct LoadReport {
  std::vector<std::string> missing;
  std::vector<std::string> unused;
  int64_t bytes_read = 0; ///< of tensors, by this rank; whole blocks where they are verified
};

/// `dir` is a folder that `save` wrote, a Hugging Face folder (model.safetensors, or several files and
/// model.safetensors.index.json; nothing else in it is read), a folder of PyTorch's distributed checkpoint
/// (HuggingFaceStorageWriter or FileSystemWriter), or one safetensors file.
///
/// Reads the checkpoint `dir` into the tensors of `state`, in place, and its values into `state`; then hands optimizers their
/// state.
///
/// Every rank of the job calls it. The job may have any number of ranks, and the tensors any placement, or none: each rank reads
/// only the bytes that its parts need. Names, shapes and dtypes are compared before anything is written; an error lists all that
/// differ. An error on any rank is an error on every rank, and names the rank, the file and the tensor; after one while data is
/// read (a wrong checksum, a vanished file), the tensors hold a mixture of old and new values.
LoadReport load(StateDict& state, const std::filesystem::path& dir, const LoadOptions& options = {});
LoadReport load(StateDict&& state, const std::filesystem::path& dir, const LoadOptions& options = {});

/// The newest complete checkpoint among the folders in `root`, by the time it was saved; empty when there is none. Folders of
/// others are passed over; a damaged index is an error. Local.
std::filesystem::path latest(const std::filesystem::path& root);

/// Reads every byte of the checkpoint `dir` and compares it with its checksum (of folders that others wrote, the structure is
/// checked). Returns what is wrong, one line a finding that names the file and, in data, the tensor; nothing when the checkpoint
/// is whole. Local.
std::vector<std::string> verify(const std::filesystem::path& dir);

} // namespace tessera::checkpoint
