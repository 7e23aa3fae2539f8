#pragma once

#include <tessera/fsdp/gather_extension.h>
#include <torch/torch.h>

#include <memory>
#include <string>

namespace tessera::testing::scripts {

/// For one matrix in two or so: what is sent of it is another than its shard, and loses nothing.
std::shared_ptr<GatherExtension> extension_of(const std::string& name, const torch::Tensor& parameter);

} // namespace tessera::testing::scripts
