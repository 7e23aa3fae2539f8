// The controls of sharded modules, which change no number.
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/fsdp/scripts/action.h>

#include <optional>
#include <vector>

namespace tessera::testing::scripts {
namespace {

/// One of the model's modules, where it is sharded.
std::optional<FSDPModule> random_module(Turn& turn) {
  const auto modules = turn.trainee.model->modules();
  const auto module = turn.draw.chance(30) ? modules.front() : turn.draw.of(modules);
  if (!turn.side.sharded || !is_sharded(*module)) return {};
  return fsdp(*module);
}

void unshard(Turn& turn) {
  if (auto module = random_module(turn)) module->unshard();
}

void unshard_async(Turn& turn) {
  const bool waits = turn.draw.chance(50);
  auto module = random_module(turn);
  if (!module) return;
  auto handle = module->unshard_async();
  if (waits) handle.wait();
}

void set_prefetch(Turn& turn) {
  const auto depth = turn.draw.below(4);
  const bool forward = turn.draw.chance(50), backward = turn.draw.chance(70), recurse = turn.draw.chance(50);
  const int64_t buffers = 1 + turn.draw.below(2);
  auto module = random_module(turn), first = random_module(turn), second = random_module(turn);
  if (!module || !module->state()->group()) return;
  module->set_prefetch_depth(depth, recurse);
  module->set_unshard_in_backward(backward);
  module->set_reduce_scatter_max_input_buffers(buffers, recurse);
  std::vector<FSDPModule> ahead;
  if (first) ahead.push_back(*first);
  if (second) ahead.push_back(*second);
  forward ? module->set_modules_to_forward_prefetch(ahead) : module->set_modules_to_backward_prefetch(ahead);
}

void reshard(Turn& turn) {
  if (auto module = random_module(turn)) module->reshard();
}

void set_reshard_after_forward(Turn& turn) {
  const bool on = turn.draw.chance(50), recurse = turn.draw.chance(50);
  if (auto module = random_module(turn)) module->set_reshard_after_forward(on, recurse);
}

void set_reshard_after_backward(Turn& turn) {
  const bool on = turn.draw.chance(50), recurse = turn.draw.chance(50);
  if (auto module = random_module(turn)) module->set_reshard_after_backward(on, recurse);
}

void set_divide_factor(Turn& turn) {
  if (auto module = random_module(turn)) module->set_gradient_divide_factor(static_cast<double>(process_context().world_size()));
}

} // namespace

std::vector<Action> sharding_actions() {
  return {{"unshard", 4, When::kAnywhere, unshard},
          {"unshard_async", 3, When::kAnywhere, unshard_async},
          {"set_prefetch", 3, When::kAnywhere, set_prefetch},
          {"reshard", 4, When::kAnywhere, reshard},
          {"set_reshard_after_forward", 3, When::kAnywhere, set_reshard_after_forward},
          {"set_reshard_after_backward", 3, When::kAnywhere, set_reshard_after_backward},
          {"set_gradient_divide_factor", 2, When::kReduced, set_divide_factor}};
}

} // namespace tessera::testing::scripts
