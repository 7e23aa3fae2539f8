#include "block_runs.h"

#include <tessera/activations/recompute.h>
#include <tessera/activations/saved_tensors.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/fully_shard.h>

#include <ATen/core/dispatch/Dispatcher.h>

namespace tessera::testing::scripts {
namespace {

Tensor run_plainly(const BlockPtr& block, const Tensor& x, const Tensor& ids) { return block->forward(x, ids); }

Tensor call_block(const BlockPtr& block, const Tensor& x, const Tensor& ids) {
  return is_sharded(*block) ? tessera::call(block, x, ids) : block->forward(x, ids);
}

Tensor call_by_name(const BlockPtr& block, const Tensor& x, const Tensor& ids) {
  return is_sharded(*block) ? tessera::call(block, &Block::forward, x, ids) : block->forward(x, ids);
}

Tensor run_in_a_scope(const BlockPtr& block, const Tensor& x, const Tensor& ids) {
  std::optional<ForwardScope> scope;
  if (is_sharded(*block)) scope.emplace(*block);
  return block->forward(x, ids);
}

/// Another tensor of the same values.
TensorPlace copies() {
  return [](const Tensor& tensor) { return [copy = tensor.detach().clone()] { return copy.clone(); }; };
}

TensorPlace random_place(Draw& draw) {
  switch (draw.below(3)) {
    case 0: return host_memory(draw.chance(50));
    case 1: return file_memory(std::filesystem::temp_directory_path());
    default: return copies();
  }
}

RunBlock in_a_place(const TensorPlace& place, const RunBlock& run) {
  return [place, run](const BlockPtr& block, const Tensor& x, const Tensor& ids) {
    const auto scope = saved_tensors_in(place);
    return run(block, x, ids);
  };
}

bool keeps_matrix_products(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue>) {
  return op.operator_name().name.find("mm") != std::string::npos;
}

RecomputeOptions random_options(Draw& draw) {
  RecomputeOptions options;
  options.early_stop = draw.chance(60);
  options.keep_rng_state = draw.chance(50);
  if (draw.chance(20)) options.keep = keeps_matrix_products;
  if (draw.chance(10)) options.keep = [](const auto&, auto) { return true; };
  if (draw.chance(30)) options.place = random_place(draw);
  return options;
}

RunBlock recomputed(const RecomputeOptions& options) {
  return [options](const BlockPtr& block, const Tensor& x, const Tensor& ids) { return recompute(options, block, x, ids); };
}

/// The running statistics of a lambda's modules, and other buffers, would be written twice.
RunBlock recomputed_around(const RecomputeOptions& options, const RunBlock& run) {
  return [options, run](const BlockPtr& block, const Tensor& x, const Tensor& ids) {
    if (!block->buffers().empty()) return recompute(options, block, x, ids);
    return recompute(
        options, [block, run](const Tensor& x, const Tensor& ids) { return run(block, x, ids); }, x, ids);
  };
}

BlockRun random_recomputation(Draw& draw, bool may_call) {
  const auto options = random_options(draw), inner = random_options(draw);
  const auto place = random_place(draw);
  switch (draw.below(5)) {
    case 0: return {"recomputed around a call", recomputed_around(options, may_call ? call_block : run_plainly)};
    case 1: return {"recomputed twice", recomputed_around(options, recomputed(inner))};
    case 2: return {"recomputed within a place", in_a_place(place, recomputed(options))};
    case 3: return {"recomputed around a place", recomputed_around(options, in_a_place(place, run_plainly))};
    default: return {"recomputed", recomputed(options)};
  }
}

} // namespace

BlockRun random_run(Draw& draw, bool at_once, bool may_call) {
  if (at_once && draw.chance(40)) return random_recomputation(draw, may_call);
  if (at_once && draw.chance(15)) {
    const RunBlock run = draw.chance(50) && may_call ? call_block : run_plainly;
    return {"saved elsewhere", in_a_place(random_place(draw), run)};
  }
  switch (draw.below(12)) {
    case 0: return may_call ? BlockRun{"called", call_block} : BlockRun{"", run_plainly};
    case 1: return may_call ? BlockRun{"called by name", call_by_name} : BlockRun{"", run_plainly};
    case 2: return {"in scopes", run_in_a_scope};
    default: return {"", run_plainly};
  }
}

} // namespace tessera::testing::scripts
