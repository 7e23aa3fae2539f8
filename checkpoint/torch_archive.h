#pragma once

// Internal: reads what PyTorch writes as a zip archive, without executing anything in it.

#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/pickle.h>
#include <tessera/checkpoint/state_value.h>

namespace tessera::internal {

/// A part of a file that holds one zip archive, as torch.save writes it.
class ArchivePart : public caffe2::serialize::ReadAdapterInterface {
 public:
  ArchivePart(const File& file, int64_t offset, int64_t length);
  size_t size() const override { return static_cast<size_t>(length_); }
  size_t read(uint64_t position, void* data, size_t bytes, const char* what) const override;

 private:
  const File& file_;
  int64_t offset_, length_;
};

/// A record of the archive; an error that begins with `what` for one that says it is larger than `part`.
std::string archive_record(caffe2::serialize::PyTorchStreamReader& archive, const ArchivePart& part, const std::string& name,
                           const std::string& what);

/// A number, a text, or a list of them; nothing for anything else. `limit`: how much text a list may hold; its items may be one
/// and the same.
std::optional<StateValue> state_value_of(PickleRef root, size_t limit);

/// True for a file that begins as a zip archive, or as one of `save_torch`.
bool is_torch_file(const std::filesystem::path& path);

/// The tensors and values of a file of `save_torch`, of Python's torch.save with a zip archive, or of LibTorch's torch::save.
/// What dicts and modules hold has names with dots; what is neither a tensor nor a value of a state is passed over. Errors, which
/// begin with the path: no such archive, a tensor that is not stored in row-major order or has a dtype that is not known.
Index index_of_torch_file(const std::filesystem::path& path);

} // namespace tessera::internal
