#pragma once

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace tessera::benchmarks {

/// A measurement that `benchmarks/compare` can ask for by name.
using Commands = std::map<std::string, std::function<nlohmann::json()>>;

/// Prints "ready", then answers the lines of standard input until it ends: each names a command, and the answer is its result as
/// one line of JSON. So two programs that wait for their turn can be measured turn by turn.
void serve(const Commands& commands);

} // namespace tessera::benchmarks
