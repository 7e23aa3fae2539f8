#pragma once

// Internal: where a checkpoint's files are read: a folder, or a storage.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include <tessera/checkpoint/bytes/byte_source.h>
#include <tessera/checkpoint/storage.h>

namespace tessera::internal {

/// Local to a rank, and cheap to copy.
class CheckpointSource {
 public:
  CheckpointSource() = default;
  /// A folder. Implicit, since its path is one source.
  CheckpointSource(std::filesystem::path folder) : folder_(std::move(folder)) {} // NOLINT(google-explicit-constructor)
  /// The objects "<checkpoint>/<file>" of a storage, which must outlive it.
  CheckpointSource(const checkpoint::Storage& storage, std::string checkpoint)
      : storage_(&storage), checkpoint_(std::move(checkpoint)) {}

  /// A name for people: the folder's path, or the checkpoint's name.
  std::string name() const { return storage_ ? checkpoint_ : folder_.string(); }
  /// An error that names the file where there is none.
  std::unique_ptr<ByteSource> open(const std::string& file) const;

 private:
  std::filesystem::path folder_;
  const checkpoint::Storage* storage_ = nullptr;
  std::string checkpoint_;
};

} // namespace tessera::internal
