#pragma once

// Internal: Hugging Face's config.json.

#include <string>
#include <vector>

#include <tessera/checkpoint/bytes/json.h>
#include <tessera/plan/models/transformer_config.h>

namespace tessera::internal::models {

/// The transformer that a config describes. Errors name the key.
TransformerConfig read_transformer(const JsonView& config);

/// The architectures that it knows, sorted.
std::vector<std::string> transformer_architectures();

} // namespace tessera::internal::models
