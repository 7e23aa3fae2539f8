#pragma once

// Internal: what names mean in a folder of checkpoints.

#include <filesystem>
#include <string>

namespace tessera::internal {

/// The link to the newest checkpoint.
inline constexpr const char* kLatestName = "latest";
inline constexpr const char* kHuggingFaceFile = "model.safetensors";
inline constexpr const char* kHuggingFaceIndex = "model.safetensors.index.json";
/// What the index of any other name ends with.
inline constexpr const char* kIndexOfSafetensors = ".safetensors.index.json";

/// ".<name>.<purpose>-<pid>-<number>" beside `path`: a name of this process that no checkpoint has.
std::filesystem::path hidden_name(const std::filesystem::path& path, const std::string& purpose);

} // namespace tessera::internal
