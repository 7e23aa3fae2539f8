#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/fsdp/memory_prediction.h>
#include <tessera/training/train_config.h>

namespace tools {

/// A parameter of a model, and the block that it is sharded with; an empty one is the root.
struct ShapeOfParameter {
  std::string name, block;
  std::vector<int64_t> sizes;
  c10::ScalarType dtype = c10::kFloat;
};

/// `parameters` numbers in `blocks` equal blocks, each with matrices as those of a Transformer's.
std::vector<ShapeOfParameter> shapes_of_blocks(int64_t parameters, int64_t blocks);

/// The tensors of a checkpoint or a Hugging Face folder. Those below one number ("layers.3") are a block.
std::vector<ShapeOfParameter> shapes_in(const std::string& path);

/// What a rank holds of such a model under `config`, as `tessera::explain` predicts it, without activations. `ranks` are
/// pretended.
tessera::MemoryPrediction predict(const tessera::TrainConfig& config, const std::vector<ShapeOfParameter>& shapes, int64_t ranks);

} // namespace tools
