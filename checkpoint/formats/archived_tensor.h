#pragma once

// Internal: PyTorch's zip archives, and the tensors in them, as pickles describe them.

#include <c10/core/ScalarType.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/bytes/pickle.h>

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

/// The archive in `part`. Errors begin with `what`, and say that the file is cut short or damaged, and how many bytes there are.
class Archive {
 public:
  Archive(std::shared_ptr<ArchivePart> part, std::string what);
  bool has(const std::string& record);
  /// Also an error for a record that says it is larger than the part.
  std::string read(const std::string& record);
  int64_t bytes(const std::string& record);
  bool is_compressed(const std::string& record);
  /// Byte of the part.
  int64_t data_begin(const std::string& record);

 private:
  template <typename Read>
  auto checked(const std::string& problem, const Read& read) const;

  std::shared_ptr<ArchivePart> part_;
  std::string what_;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
};

/// A tensor whose data is a part of a record of its archive.
struct ArchivedTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::string record;
  int64_t begin = 0; ///< byte of the record where its data starts, row-major
  int64_t bytes = 0;
};

/// The dtype of "torch.float32" and so on; an error that begins with `what` for one that is not known.
at::ScalarType dtype_from_python(const std::string& name, const std::string& what);

/// What `torch._utils._rebuild_tensor_v2` or `_rebuild_tensor_v3` would make. Errors, which begin with `what`: another call, a
/// dtype that is not known, strides that are not row-major, and a conjugate or negative view, whose data has other values.
ArchivedTensor archived_tensor(PickleRef value, const std::string& what);

/// The byte of the archive where the data of a tensor starts. Errors, which begin with `what`: a record that is too short or
/// compressed.
int64_t data_begin(Archive& archive, const ArchivedTensor& tensor, const std::string& what);

} // namespace tessera::internal
