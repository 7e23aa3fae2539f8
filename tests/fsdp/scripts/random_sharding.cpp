#include "random_sharding.h"

#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/options.h>
#include <tessera/nn/sync_batch_norm.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include <tessera/tests/fsdp/scripts/random_extension.h>
#include <tessera/tests/fsdp/scripts/random_ignored.h>
#include <tessera/tests/fsdp/scripts/random_mesh.h>
#include <tessera/tests/fsdp/scripts/random_optimizer.h>
#include <tessera/tests/fsdp/scripts/random_policy.h>
#include <tessera/tests/support/test_device.h>

namespace tessera::testing::scripts {
namespace {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

class Sharder {
 public:
  Sharder(uint64_t seed, bool extends, const std::optional<MixedPrecisionPolicy>& emulated)
      : draw_(seed),
        extends_(extends),
        emulates_(emulated),
        on_(draw_),
        changes_mesh_(draw_.chance(15)),
        policy_(emulated ? *emulated : random_policy(draw_)),
        layouts_(draw_.below(3)),
        percent_(draw_.below(101)),
        offload_percent_(draw_.chance(25) ? draw_.of(std::vector<int64_t>{50, 100}) : 0) {}

  Sharding shard(RandomModel& model) {
    sharding_.description = on_.description() + (emulates_ ? ", emulated" : policy_.param_dtype ? ", in float" : "");
    changes_mesh_ = changes_mesh_ && model.parameters().size() == distinct(model.parameters()).size();
    if (!emulates_) model.set_input_dtype(policy_.param_dtype);
    sharding_.computes_in_float = policy_.param_dtype && !emulates_;
    if (!policy_.param_dtype) ignored_ = ignore_at_random(model, draw_); // those stay in double
    sharding_.ignores = !ignored_.empty();
    if (sharding_.ignores) sharding_.description += c10::str(", ", ignored_.size(), " ignored");
    const bool converts_first = draw_.chance(50) || policy_.param_dtype; // which LibTorch's own could not compute with
    if (converts_first) convert_sync_batch_norm(model, on_.mesh);
    const auto& blocks = model.blocks();
    for (size_t i = 0; i < blocks.size(); ++i) {
      change_mesh();
      const bool pair = !on_.replicates && i + 1 < blocks.size() && draw_.chance(15);
      if (pair && shard_list({blocks[i], blocks[i + 1]})) {
        ++i;
      } else {
        visit(*blocks[i]);
      }
    }
    change_mesh();
    shard_module(model, "root");
    if (!converts_first) convert_sync_batch_norm(model, on_.mesh);
    return sharding_;
  }

 private:
  FullyShardOptions random_options(const std::vector<torch::Tensor>& parameters) {
    FullyShardOptions options;
    options.strategy = on_.strategy;
    options.ignored_params = ignored_;
    if (draw_.chance(50)) options.reshard_after_forward = draw_.chance(50) && !on_.keeps_parameters();
    const bool by_neighbours = !on_.strategy && !on_.replicates && shard_ranks() == 4;
    if (by_neighbours && draw_.chance(20)) options.reshard_after_forward = 2;
    const bool per_parameter = layouts_ == 2 ? draw_.chance(50) : layouts_ == 1;
    options.layout = per_parameter ? BufferLayout::kPerParameter : BufferLayout::kRagged;
    options.mixed_precision = emulates_ ? policy_ : policy_of_group(policy_, draw_);
    sharding_.rounds_to_float |= !emulates_ && rounds_to_float(options.mixed_precision);
    if (!on_.replicates && draw_.chance(15)) options.shard_placement_fn = random_placements(parameters);
    const bool gathers = !on_.replicates && !(options.reshard_after_forward && options.reshard_after_forward->ranks());
    if (extends_ && gathers && !options.shard_placement_fn && draw_.chance(50)) options.gather_extension_fn = extension_of;
    if (on_.replicates && draw_.chance(50)) options.bucket_bytes = 100 + draw_.below(2000);
    if (draw_.chance(offload_percent_)) options.offload = random_offload();
    if (draw_.chance(10)) options.initial_weights = InitialWeights::kBroadcast;
    if (draw_.chance(10)) options.initial_weights = InitialWeights::kUnchecked;
    if (draw_.chance(20)) options.communicators = CommunicatorUse::kShared;
    const bool is_real = std::none_of(parameters.begin(), parameters.end(), [](const auto& each) { return each.is_complex(); });
    if (is_real && draw_.chance(15)) options.communication.reduction = reduction_that_loses_nothing(draw_.chance(50));
    return options;
  }

  /// The messages of a quantized reduction, all of whose numbers are sent as they are.
  static std::shared_ptr<const ReductionPolicy> reduction_that_loses_nothing(bool feeds_errors_back) {
    return quantized_reduction({.smallest = std::numeric_limits<int64_t>::max(), .error_feedback = feeds_errors_back});
  }

  OffloadPolicy random_offload() {
    const bool pinned = draw_.chance(50);
    if (tests_the_cpu() || draw_.chance(50)) return offload_to_files(std::filesystem::temp_directory_path(), pinned);
    return offload_to_host(pinned);
  }

  /// Of the shard axis.
  int64_t shard_ranks() const {
    return on_.strategy == tessera::Strategy::kHierarchical ? on_.mesh.size() : on_.mesh.size(on_.mesh.ndim() - 1);
  }

  /// Any dim, or all rows on one rank, or whole on every rank.
  ShardPlacementFn random_placements(const std::vector<torch::Tensor>& parameters) {
    const auto seed = static_cast<uint64_t>(draw_.below(1000));
    const auto ranks = shard_ranks();
    if (draw_.chance(25)) return whole_on_one_rank(parameters, ranks);
    return [seed, ranks](const std::string& name, const torch::Tensor& parameter) -> std::optional<Placement> {
      Draw draw(seed + name.size());
      if (draw.chance(20)) return Replicate{};
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
                 options.gather_extension_fn ? " with extensions" : "", options.communication.reduction ? " in messages" : "",
                 options.offload == OffloadPolicy() ? "" : " offloaded",
                 options.communicators == CommunicatorUse::kShared ? " on one communicator" : "");
  }

  /// Of whole blocks, without tied weights: operators on parameters alone know one mesh.
  void change_mesh() {
    if (!changes_mesh_) return;
    on_ = RandomMesh(draw_);
    sharding_.description += "; " + on_.description();
  }

  /// Others than those that are ignored.
  bool has_parameters(const torch::nn::Module& module) const {
    const auto all = module.parameters();
    const auto is_ignored = [&](const torch::Tensor& parameter) {
      return std::any_of(ignored_.begin(), ignored_.end(), [&](const auto& each) { return each.is_same(parameter); });
    };
    return !std::all_of(all.begin(), all.end(), is_ignored);
  }

  FullyShardOptions next_options(const std::string& what, const std::vector<torch::Tensor>& parameters) {
    auto options = random_options(parameters);
    describe(what, options);
    return options;
  }

  void shard_module(torch::nn::Module& module, const std::string& what) {
    if (is_sharded(module) || !has_parameters(module)) return;
    const auto options = next_options(what, module.parameters());
    on_.replicates ? replicate(module, on_.mesh, options) : fully_shard(module, on_.mesh, options);
  }

  bool shard_list(const std::vector<ModulePtr>& modules) {
    std::vector<torch::Tensor> parameters;
    for (const auto& module : modules) {
      const auto own = module->parameters();
      if (is_sharded(*module) || !has_parameters(*module)) return false;
      parameters.insert(parameters.end(), own.begin(), own.end());
    }
    const auto options = next_options("list of " + std::to_string(modules.size()), parameters);
    fully_shard(modules, on_.mesh, options);
    return true;
  }

  /// From the leaves up, as `fully_shard` wants it.
  void visit(torch::nn::Module& module) {
    for (const auto& child : module.children()) {
      const bool is_block = dynamic_cast<Block*>(child.get()) != nullptr;
      if (is_block || draw_.chance(10)) visit(*child);
    }
    if (draw_.chance(percent_) || changes_mesh_) shard_module(module, module.name().substr(module.name().rfind(':') + 1));
  }

  Draw draw_;
  bool extends_;  ///< some groups have gather extensions
  bool emulates_; ///< the unsharded side does what the policy says
  RandomMesh on_;
  bool changes_mesh_; ///< each block has a mesh and a strategy of its own
  MixedPrecisionPolicy policy_;
  std::vector<torch::Tensor> ignored_;
  int64_t layouts_;         ///< 0: ragged, 1: per parameter, 2: both
  int64_t percent_;         ///< of the modules are sharded by themselves
  int64_t offload_percent_; ///< of the groups have their state in files or, for a device, in the host's memory
  Sharding sharding_;
};

} // namespace

Sharding shard_at_random(RandomModel& model, uint64_t seed, bool extends, const std::optional<MixedPrecisionPolicy>& emulated) {
  return Sharder(seed, extends, emulated).shard(model);
}

} // namespace tessera::testing::scripts
