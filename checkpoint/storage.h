#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::checkpoint {

/// A new object that is being written, from its first byte to its last: the parts of a multi-part upload.
class ObjectWriter {
 public:
  /// Where `close` was not called, or threw, nothing of the object stays.
  virtual ~ObjectWriter() = default;
  virtual void append(const void* data, size_t bytes) = 0;
  /// The object exists from now on, whole and durable, in the place of an older one of its name.
  virtual void close() = 0;
};

/// Named objects of bytes, as object stores keep them: they are written once, read in ranges, and removed. There is no rename,
/// and nothing in an object changes. A program derives from it to save checkpoints elsewhere than in a folder.
///
/// Every rank has a Storage of its own to the same objects: what one rank closed or removed, all ranks see. `size`, `read` and
/// `list` may be called from several threads at the same time. Any of them may throw; that is an error of the save or load, on
/// every rank.
class Storage {
 public:
  virtual ~Storage() = default;
  virtual std::unique_ptr<ObjectWriter> create(const std::string& name) = 0;
  /// Bytes of an object; nothing where there is none of this name.
  virtual std::optional<int64_t> size(const std::string& name) const = 0;
  /// Reads exactly `bytes` at `offset`; an error where the object is shorter.
  virtual void read(const std::string& name, int64_t offset, void* data, size_t bytes) const = 0;
  /// The objects whose names begin with `prefix`, in any order.
  virtual std::vector<std::string> list(const std::string& prefix) const = 0;
  /// Nothing happens where there is no such object.
  virtual void remove(const std::string& name) = 0;
};

} // namespace tessera::checkpoint
