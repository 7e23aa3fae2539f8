#pragma once

// Internal: the arguments that fill values "auto".

#include <optional>
#include <string>

#include <tessera/checkpoint/bytes/json.h>
#include <tessera/training/config/keys/config_key.h>
#include <tessera/training/train_arguments.h>

namespace tessera::internal {

/// The argument that fills a key: its name, and its value where the program has it.
struct Filling {
  std::string argument;
  std::optional<Json> value;
};

inline bool is_auto(const Json& value) { return value == "auto"; }

Filling filling_of(AutoFill filler, const TrainArguments& arguments);

} // namespace tessera::internal
