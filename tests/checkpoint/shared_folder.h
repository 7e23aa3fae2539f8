#pragma once

#include <c10/util/StringUtil.h>
#include <tessera/collectives/process_context.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <optional>

#include "../support/temporary_folder.h"

namespace tessera::testing {

/// An empty folder that all ranks see; every rank makes it and lets it go at the same point of the program.
class SharedFolder {
 public:
  explicit SharedFolder(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    auto& context = process_context();
    static int made = 0;
    const auto key = c10::str("shared-folder/", made++);
    if (context.rank() == 0) {
      folder_.emplace(parent);
      context.store()->set(key, folder_->path().string());
    }
    path_ = context.store()->get_to_str(key);
  }
  /// A test that fails after it has left the job fails for its own reason.
  ~SharedFolder() {
    if (is_initialized()) barrier();
  }
  const std::filesystem::path& path() const { return path_; }

  static void barrier() {
    auto& context = process_context();
    std::vector<int64_t> world(static_cast<size_t>(context.world_size()));
    for (size_t i = 0; i < world.size(); ++i) world[i] = static_cast<int64_t>(i);
    context.communicator(world, at::kCPU)->barrier("shared folder");
  }

 private:
  std::optional<TemporaryFolder> folder_; // rank 0's
  std::filesystem::path path_;
};

} // namespace tessera::testing
