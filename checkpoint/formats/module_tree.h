#pragma once

// Internal: a state as the TorchScript modules that torch::save writes and torch::load reads: one object for each part of a name
// between dots, and a class for each set of fields.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/optim/state_value.h>

namespace tessera::internal {

/// A tensor and the record with its data.
struct StoredTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::string key;
};

using ModuleField = std::variant<StoredTensor, StateValue>;

/// Objects of LibTorch's archives.
struct ModuleArchive {
  std::string pickle; ///< the record data.pkl
  std::string code;   ///< the record code/__torch__.py, with the classes
};

/// Puts "layers.0.weight" into the field "weight" of the field "0" of the field "layers". Errors: a name with nothing before,
/// between or after its dots, and a name that is both an entry and the begin of another one's.
/// `submodules` are there even where they have no field.
ModuleArchive module_archive(const std::vector<std::pair<std::string, ModuleField>>& fields,
                             const std::vector<std::string>& submodules);

} // namespace tessera::internal
