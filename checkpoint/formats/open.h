#pragma once

// Internal: finds out what kind of checkpoint a path is.

#include <filesystem>

#include <tessera/checkpoint/formats/checkpoint_source.h>
#include <tessera/checkpoint/formats/index.h>

namespace tessera::internal {

/// A checkpoint to read from, ours or another library's.
struct Opened {
  CheckpointSource source; ///< a folder with symbolic links resolved, so that a moving `latest` is followed once
  Index index;
};

/// Reads the index of one of:
///   a folder with index.json: our format;
///   a folder with model.safetensors: Hugging Face's, this file alone, as transformers reads it (variants and adapters may lie
///   beside it, and an index of older files);
///   a folder with model.safetensors.index.json: Hugging Face's, several files;
///   a folder with other *.safetensors files: those of PyTorch's HuggingFaceStorageWriter (parts of tensors), or whole tensors;
///   a folder with .metadata: PyTorch's FileSystemWriter;
///   one safetensors file;
///   one file of `save_torch`, of Python's torch.save or of LibTorch's torch::save.
/// Errors name the path, and say what was expected there.
Opened open_checkpoint(const std::filesystem::path& path);
/// The checkpoint `name` of a storage, which must outlive the result; in our format.
Opened open_checkpoint(const checkpoint::Storage& storage, const std::string& name);

/// The names of the *.safetensors files in a folder, sorted.
std::vector<std::string> safetensors_files_in(const std::filesystem::path& folder);

/// The index of safetensors files that others wrote, from their headers alone. A file's DCP_SHARDING_INFO says where its parts
/// lie in their tensors; the size of a tensor is where its last part ends, as PyTorch's reader takes it. Errors: a file that is
/// not valid, parts that overlap or leave gaps, a tensor that the Hugging Face index lists and its file lacks.
Index index_of_safetensors(const std::filesystem::path& folder, const std::vector<std::string>& files);

} // namespace tessera::internal
