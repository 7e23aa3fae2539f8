#pragma once

// Internal: the sections of a config from its values.

#include <string>
#include <vector>

#include <tessera/training/config/values/config_values.h>
#include <tessera/training/train_config.h>

namespace tessera::internal {

/// Errors of these functions name the key.
ShardingConfig sharding_of(ConfigValues& values, int64_t ranks);
PrecisionConfig precision_of(const ConfigValues& values);
GradScalerOptions scaler_of(const ConfigValues& values);
OptimizerConfig optimizer_of(const ConfigValues& values);
ScheduleConfig schedule_of(const ConfigValues& values);
/// The result has no meshes.
TrainerOptions trainer_options_of(ConfigValues& values, const BatchConfig& batch);

/// The ranks of the dims that have different rows.
int64_t data_ranks(const ShardingConfig& sharding);

} // namespace tessera::internal
