#include <tessera/checkpoint/load/load_names.h>

#include <exception>

namespace tessera::internal {

bool accepts(const NameFilter& filter, const std::string& name) { return !filter || filter(name); }

std::optional<std::string> saved_name(const std::string& name, const checkpoint::LoadOptions& options) {
  if (!options.rename) return name;
  try {
    return options.rename(name);
  } catch (const std::exception&) { // of `map.at`, for example
    if (accepts(options.filter, name)) throw;
    return std::nullopt;
  }
}

} // namespace tessera::internal
