#include "memory.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/formats/open.h>
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/explain.h>
#include <tessera/fsdp/fully_shard.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>

namespace tools {

namespace {

using torch::nn::Module;

/// "model.layers.3" of "model.layers.3.mlp.weight"; empty where no part is a number.
std::string block_of(const std::string& name) {
  size_t begin = 0;
  for (auto dot = name.find('.'); dot != std::string::npos; begin = dot + 1, dot = name.find('.', begin)) {
    const auto part = name.substr(begin, dot - begin);
    if (!part.empty() && part.find_first_not_of("0123456789") == std::string::npos) return name.substr(0, dot);
  }
  return "";
}

/// The names that a module takes have no dots.
std::string without_dots(std::string name) {
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

struct Model {
  std::shared_ptr<Module> root = std::make_shared<Module>("model");
  std::vector<std::shared_ptr<Module>> blocks;
};

Model build(const std::vector<ShapeOfParameter>& shapes) {
  Model model;
  std::map<std::string, std::shared_ptr<Module>> blocks;
  for (const auto& shape : shapes) {
    auto& block = blocks[shape.block];
    if (!block) {
      block = shape.block.empty() ? model.root : std::make_shared<Module>(without_dots(shape.block));
      if (!shape.block.empty()) {
        model.root->register_module(without_dots(shape.block), block);
        model.blocks.push_back(block);
      }
    }
    const bool trains = at::isFloatingType(shape.dtype);
    block->register_parameter(without_dots(shape.name), at::empty(shape.sizes, at::TensorOptions(shape.dtype).device(at::kMeta)),
                              trains);
  }
  return model;
}

} // namespace

std::vector<ShapeOfParameter> shapes_of_blocks(int64_t parameters, int64_t blocks) {
  TORCH_CHECK_VALUE(blocks >= 1 && parameters >= blocks, "--parameters is ", parameters, " and --blocks is ", blocks,
                    ", but there must be a parameter for each block");
  constexpr auto kShares = std::to_array<int64_t>({3, 1, 4, 4}); // q, k and v; output; up; down
  constexpr int64_t kWhole = 12;
  std::vector<ShapeOfParameter> shapes;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t numbers = (parameters / blocks) + (block < parameters % blocks ? 1 : 0);
    int64_t left = numbers;
    for (size_t i = 0; i < kShares.size(); ++i) {
      const int64_t size = i + 1 == kShares.size() ? left : numbers * kShares[i] / kWhole;
      left -= size;
      shapes.push_back({"matrix" + std::to_string(i), "blocks." + std::to_string(block), {size}});
    }
  }
  return shapes;
}

std::vector<ShapeOfParameter> shapes_in(const std::string& path) {
  std::vector<ShapeOfParameter> shapes;
  for (const auto& tensor : tessera::internal::open_checkpoint(path).index.tensors) {
    if (tensor.name.starts_with("optimizer.")) continue;
    shapes.push_back({tensor.name, block_of(tensor.name), tensor.sizes, tensor.dtype});
  }
  TORCH_CHECK_VALUE(!shapes.empty(), path, " holds no tensors");
  return shapes;
}

tessera::MemoryPrediction predict(const tessera::TrainConfig& config, const std::vector<ShapeOfParameter>& shapes,
                                  int64_t ranks) {
  tessera::init_fake_process_group(/*rank=*/0, static_cast<int>(ranks));
  auto model = build(shapes);
  config.set_dtype(*model.root);
  const auto mesh = config.shard_mesh(config.make_mesh(at::kMeta));
  auto options = config.shard_options();
  options.offload = {}; // `explain` counts what is offloaded as if it were on the device
  if (config.sharding.strategy == tessera::Strategy::kNoShard) {
    tessera::replicate(*model.root, mesh, options);
  } else {
    for (const auto& block : model.blocks) tessera::fully_shard(*block, mesh, options);
    tessera::fully_shard(*model.root, mesh, options);
  }
  auto memory = tessera::explain(*model.root, {.optimizer_tensors = tessera::optimizer_tensors(config.optimizer)}).memory;
  for (const auto& shape : shapes) { // in the words of the checkpoint
    const auto name = without_dots(shape.block);
    if (const auto at = memory.peak_at.rfind(" " + name);
        !name.empty() && at != std::string::npos && at + 1 + name.size() == memory.peak_at.size())
      memory.peak_at = memory.peak_at.substr(0, at + 1) + shape.block;
  }
  model = {};
  tessera::destroy_process_group();
  return memory;
}

} // namespace tools
