#pragma once

// Internal: what Python's optimizers save, in the names and kinds that ours have.

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/open.h>

namespace tessera::internal {

/// Changes the index of `opened`, a checkpoint of a Python program, to the names of `state`: those of the model as `rename` of
/// the options says (null: the same), and those of the optimizer by its parameters' names. Scalars of the optimizer that are
/// tensors become values too. Errors: parameters that are numbered, options that LibTorch's optimizers do not have, two entries
/// that get one name.
void take_names_from_python(Opened& opened, const checkpoint::PythonKeys& keys, const checkpoint::LoadOptions& options,
                            const StateDict& state);

/// `saved` as a value of the type that `wanted` has, where no information is lost; nothing otherwise.
std::optional<StateValue> convert_number(const StateValue& saved, const StateValue& wanted);

} // namespace tessera::internal
