#include "random_sharding.h"

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/gather_extension.h>
#include <tessera/nn/sync_batch_norm.h>

#include <filesystem>
#include <optional>
#include <vector>

#include <tessera/tests/support/test_device.h>

namespace tessera::testing::scripts {
namespace {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

DeviceMesh random_mesh(Draw& draw, int64_t world) {
  std::vector<std::vector<int64_t>> shapes{{world}, {1, world}, {world, 1}};
  if (world == 4) shapes.insert(shapes.end(), 2, {2, 2});
  const auto shape = draw.of(shapes);
  if (shape.size() == 1) return init_device_mesh(test_device_type(), shape, {"shard"});
  return init_device_mesh(test_device_type(), shape, {"replicate", "shard"});
}

std::optional<tessera::Strategy> random_strategy(Draw& draw, const DeviceMesh& mesh) {
  if (draw.chance(60)) return std::nullopt;
  if (mesh.ndim() == 2) return tessera::Strategy::kHierarchical;
  return draw.of(std::vector<tessera::Strategy>{tessera::Strategy::kZero1, tessera::Strategy::kZero2});
}

/// Sends the negative of a shard, and makes the parameter of that: it loses nothing.
class Negated final : public GatherExtension {
 public:
  Sent before(const torch::Tensor& shard, const DeviceMesh&) override { return {{shard.neg()}}; }
  torch::Tensor after(const std::vector<std::vector<torch::Tensor>>& gathered, const std::any&,
                      const torch::Tensor& out) override {
    std::vector<torch::Tensor> rows;
    for (const auto& rank : gathered) rows.push_back(rank[0]);
    return out.copy_(torch::cat(rows).neg_());
  }
};

/// For one matrix in two or so.
std::shared_ptr<GatherExtension> extension_of(const std::string& name, const torch::Tensor& parameter) {
  const bool has_one = parameter.dim() == 2 && parameter.is_floating_point() && name.size() % 2 == 0;
  return has_one ? std::make_shared<Negated>() : nullptr;
}

class Sharder {
 public:
  Sharder(uint64_t seed, bool extends)
      : draw_(seed),
        extends_(extends),
        replicates_(draw_.chance(12)),
        mesh_(replicates_ ? init_device_mesh(test_device_type(), {process_context().world_size()})
                          : random_mesh(draw_, process_context().world_size())),
        strategy_(replicates_ ? std::nullopt : random_strategy(draw_, mesh_)),
        layouts_(draw_.below(3)),
        percent_(draw_.below(101)),
        offload_percent_(draw_.chance(25) ? draw_.of(std::vector<int64_t>{50, 100}) : 0) {}

  Sharding shard(RandomModel& model) {
    sharding_.description = replicates_ ? "replicate" : c10::str("mesh ", mesh_.shape());
    if (strategy_) sharding_.description += c10::str(", ", row_of(*strategy_).name);
    const bool converts_first = draw_.chance(50);
    if (converts_first) convert_sync_batch_norm(model, mesh_);
    const auto& blocks = model.blocks();
    for (size_t i = 0; i < blocks.size(); ++i) {
      const bool pair = !replicates_ && i + 1 < blocks.size() && draw_.chance(15);
      if (pair && shard_list({blocks[i], blocks[i + 1]})) {
        ++i;
      } else {
        visit(*blocks[i]);
      }
    }
    shard_module(model, "root");
    if (!converts_first) convert_sync_batch_norm(model, mesh_);
    return sharding_;
  }

 private:
  FullyShardOptions random_options() {
    FullyShardOptions options;
    options.strategy = strategy_;
    const bool keeps = strategy_ == tessera::Strategy::kZero1 || strategy_ == tessera::Strategy::kZero2;
    if (draw_.chance(50)) options.reshard_after_forward = draw_.chance(50) && !keeps;
    const auto shard_ranks = mesh_.size(mesh_.ndim() - 1);
    const bool by_neighbours = !strategy_ && !replicates_ && shard_ranks == 4;
    if (by_neighbours && draw_.chance(20)) options.reshard_after_forward = 2;
    const bool per_parameter = layouts_ == 2 ? draw_.chance(50) : layouts_ == 1;
    options.layout = per_parameter ? BufferLayout::kPerParameter : BufferLayout::kRagged;
    if (draw_.chance(10)) options.mixed_precision.reduce_dtype = draw_.chance(50) ? torch::kDouble : torch::kFloat;
    sharding_.reduces_in_float |= options.mixed_precision.reduce_dtype == torch::kFloat;
    if (!replicates_ && draw_.chance(15)) options.shard_placement_fn = random_placements();
    const bool gathers = !replicates_ && !(options.reshard_after_forward && options.reshard_after_forward->ranks());
    if (extends_ && gathers && !options.shard_placement_fn && draw_.chance(50)) options.gather_extension_fn = extension_of;
    if (replicates_ && draw_.chance(50)) options.bucket_bytes = 100 + draw_.below(2000);
    if (draw_.chance(offload_percent_))
      options.offload =
          tests_the_cpu() || draw_.chance(50) ? offload_to_files(std::filesystem::temp_directory_path()) : offload_to_host();
    if (draw_.chance(10)) options.initial_weights = InitialWeights::kBroadcast;
    if (draw_.chance(10)) options.initial_weights = InitialWeights::kUnchecked;
    if (draw_.chance(20)) options.communicators = CommunicatorUse::kShared;
    return options;
  }

  /// Any dim, or all rows on one rank.
  ShardPlacementFn random_placements() {
    const auto seed = static_cast<uint64_t>(draw_.below(1000));
    const auto ranks = strategy_ == tessera::Strategy::kHierarchical ? mesh_.size() : mesh_.size(mesh_.ndim() - 1);
    return [seed, ranks](const std::string& name, const torch::Tensor& parameter) -> std::optional<Placement> {
      Draw draw(seed + name.size());
      if (parameter.dim() == 0 || draw.chance(30)) return std::nullopt;
      if (draw.chance(70)) return Shard{draw.below(parameter.dim())};
      std::vector<int64_t> rows(static_cast<size_t>(ranks), 0);
      rows[static_cast<size_t>(draw.below(ranks))] = parameter.size(0);
      return RaggedShard{0, rows};
    };
  }

  void describe(const std::string& what, const FullyShardOptions& options) {
    const auto& keeps = options.reshard_after_forward;
    sharding_.description +=
        c10::str("; ", what, options.layout == BufferLayout::kRagged ? "" : " per parameter",
                 !keeps           ? ""
                 : keeps->ranks() ? " among neighbours"
                 : *keeps         ? " freed"
                                  : " kept",
                 options.mixed_precision.reduce_dtype ? " with reduce dtype" : "", options.shard_placement_fn ? " as placed" : "",
                 options.gather_extension_fn ? " with extensions" : "", options.offload == OffloadPolicy() ? "" : " offloaded",
                 options.communicators == CommunicatorUse::kShared ? " on one communicator" : "");
  }

  void shard_module(torch::nn::Module& module, const std::string& what) {
    if (is_sharded(module) || module.parameters().empty()) return;
    const auto options = random_options();
    describe(what, options);
    replicates_ ? replicate(module, mesh_, options) : fully_shard(module, mesh_, options);
  }

  bool shard_list(const std::vector<ModulePtr>& modules) {
    for (const auto& module : modules) {
      if (is_sharded(*module) || module->parameters().empty()) return false;
    }
    const auto options = random_options();
    describe("list of " + std::to_string(modules.size()), options);
    fully_shard(modules, mesh_, options);
    return true;
  }

  /// From the leaves up, as `fully_shard` wants it.
  void visit(torch::nn::Module& module) {
    for (const auto& child : module.children()) {
      const bool is_block = dynamic_cast<Block*>(child.get()) != nullptr;
      if (is_block || draw_.chance(10)) visit(*child);
    }
    if (draw_.chance(percent_)) shard_module(module, module.name().substr(module.name().rfind(':') + 1));
  }

  Draw draw_;
  bool extends_; ///< some groups have gather extensions
  bool replicates_;
  DeviceMesh mesh_;
  std::optional<tessera::Strategy> strategy_;
  int64_t layouts_;         ///< 0: ragged, 1: per parameter, 2: both
  int64_t percent_;         ///< of the modules are sharded by themselves
  int64_t offload_percent_; ///< of the groups have their state in files or, for a device, in the host's memory
  Sharding sharding_;
};

} // namespace

Sharding shard_at_random(RandomModel& model, uint64_t seed, bool extends) { return Sharder(seed, extends).shard(model); }

} // namespace tessera::testing::scripts
