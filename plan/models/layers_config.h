#pragma once

// Internal: a model as a list of layers in JSON, which docs/planning.md specifies.

#include <cstdint>

#include <tessera/checkpoint/bytes/json.h>
#include <tessera/plan/planned_model.h>

namespace tessera::internal::models {

inline constexpr const char* kLayersFormat = "tessera layers";

bool is_layers_config(const JsonView& json);

/// Makes its model, with rows of `sequence` tokens where that is not 0, and maybe without dropout. Errors name the key.
PlannedModel plan_layers(const JsonView& json, int64_t sequence, bool with_dropout);

} // namespace tessera::internal::models
