#pragma once

// Internal: which names of a state a load asks for, and what the checkpoint calls them.

#include <optional>
#include <string>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/export/export_names.h>

namespace tessera::internal {

/// Whether `filter` accepts the name; an unset one accepts all.
bool accepts(const NameFilter& filter, const std::string& name);

/// The name in the checkpoint of a tensor of the state. Nothing where `rename` throws for one that `filter` refuses, which it
/// need not know.
std::optional<std::string> saved_name(const std::string& name, const checkpoint::LoadOptions& options);

} // namespace tessera::internal
