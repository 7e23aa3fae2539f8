#pragma once

#include <torch/torch.h>

#include <vector>

#include <tessera/tests/fsdp/scripts/random_model.h>

namespace tessera::testing::scripts {

/// Some of the model's trained parameters, which the program moves to the device itself, and whose gradients it reduces in hooks:
/// their mean, as that of the others. Mostly none. Every rank calls it.
std::vector<torch::Tensor> ignore_at_random(RandomModel& model, Draw& draw);

} // namespace tessera::testing::scripts
