#pragma once

// Internal: the native format of PyTorch's distributed checkpoint.

#include <filesystem>

#include <tessera/checkpoint/formats/index.h>

namespace tessera::internal {

inline constexpr const char* kDistcpMetadata = ".metadata";

/// The index of a folder that PyTorch's FileSystemWriter wrote: `.metadata` and *.distcp files. Numbers, booleans, text and flat
/// lists of them become values; other Python objects are left out. Nothing in the files is executed. Errors name the file and the
/// tensor: damage, compressed items, a tensor that is not stored in row-major order or is a conjugate or negative view.
Index index_of_distcp(const std::filesystem::path& folder);

} // namespace tessera::internal
