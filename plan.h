#pragma once

/// Plans: what a training takes on machines that are not here, and the settings that fit. It includes fsdp.h's and parallel.h's
/// settings, and has no counterpart in PyTorch.

#include <tessera/plan/auto_shard.h>
#include <tessera/plan/fit_machine.h>
#include <tessera/plan/machine.h>
#include <tessera/plan/meta_operators.h>
#include <tessera/plan/model_folder.h>
#include <tessera/plan/planned_model.h>
#include <tessera/plan/prediction.h>
#include <tessera/plan/search.h>
#include <tessera/plan/settings.h>
