#pragma once

// Internal: a trainer's progress as entries of a checkpoint, under "trainer.".

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/checkpoint/state_dict.h>
#include <tessera/training/loop/step/progress.h>

namespace tessera::internal {

StateDict state_of(const Progress& progress, uint64_t seed, const std::string& config);
Progress progress_in(const StateDict& state);
uint64_t seed_in(const StateDict& state);
const std::string& config_in(const StateDict& state);

/// What differs between two texts of settings, a line for each: by the keys of their values where both are JSON objects.
std::vector<std::string> config_differences(const std::string& saved, const std::string& here);

} // namespace tessera::internal
