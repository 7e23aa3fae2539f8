#pragma once

#include <filesystem>
#include <string>
#include <unordered_map>

#include <tessera/nn/script_module.h>

namespace tessera::checkpoint {

struct ScriptFileOptions {
  /// Replace a file that is already at the target, in one rename. Without it, an existing target is an error.
  bool overwrite = false;
  /// Texts beside the script, by name, as `_extra_files` of torch.jit.save.
  std::unordered_map<std::string, std::string> extra_files = {};
};

/// Writes a script as one unsharded TorchScript file, which torch.jit.load in Python and torch::jit::load read without this
/// library: the code, attributes and mode of the script, its parameters and buffers whole, in the host's memory. Tied parameters
/// stay tied. The model itself is not changed. (Its own `script().save(…)` is an error: a sharded parameter has no storage.)
///
/// Every rank of the job calls it. Rank 0 gathers the parameters one at a time, needs memory for the whole model, and writes. The
/// file appears whole or not at all. An error on any rank is an error on every rank.
void save_script(const ScriptModule& model, const std::filesystem::path& file, const ScriptFileOptions& options = {});

} // namespace tessera::checkpoint
