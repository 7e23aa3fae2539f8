#pragma once

// Internal: reads what PyTorch writes as a zip archive, without executing anything in it.

#include <cstddef>
#include <filesystem>
#include <optional>

#include <tessera/checkpoint/bytes/pickle.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/optim/state_value.h>

namespace tessera::internal {

/// How many times its bytes what is made of a pickle may hold: values in it may be shared.
constexpr size_t kMostRepeated = 64;

/// A number, a text, or a list of them; nothing for anything else, nor for a list of texts that would take more than `limit`
/// bytes: its items may be one and the same.
std::optional<StateValue> state_value_of(PickleRef root, size_t limit);

/// True for a file that begins as a zip archive, or as one of `save_torch`.
bool is_torch_file(const std::filesystem::path& path);

/// The tensors and values of a file of `save_torch`, of Python's torch.save with a zip archive, or of LibTorch's torch::save.
/// What dicts and modules hold has names with dots; what is neither a tensor nor a value of a state is passed over, and so are
/// values that are held so often that all together would take many times the file's size. Errors, which begin with the path: no
/// such archive, a tensor that is not stored in row-major order, is a conjugate or negative view, is compressed or has a dtype
/// that is not known.
Index index_of_torch_file(const std::filesystem::path& path);

} // namespace tessera::internal
