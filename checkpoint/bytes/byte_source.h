#pragma once

// Internal: bytes that are read in any order.

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera::internal {

/// A file, or an object of a storage.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  /// A name for people.
  virtual std::string name() const = 0;
  /// Bytes, when it was opened.
  virtual int64_t size() const = 0;
  /// Reads exactly `bytes` at `offset`; an error where it is shorter. Safe to call from several threads.
  virtual void read_at(void* data, size_t bytes, int64_t offset) const = 0;
};

/// All of it: at most `limit` bytes.
std::string read_all(const ByteSource& source, int64_t limit);

} // namespace tessera::internal
