#include <tessera/optim/sharded_optimizer.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

namespace tessera {

at::Tensor ShardedOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  update();
  return loss;
}

void ShardedOptimizer::save(torch::serialize::OutputArchive& /*archive*/) const {
  TORCH_CHECK(false, "torch::save of an optimizer for shards: save tessera::state_dict(module, optimizer) instead");
}

void ShardedOptimizer::load(torch::serialize::InputArchive& /*archive*/) {
  TORCH_CHECK(false, "torch::load of an optimizer for shards: load tessera::state_dict(module, optimizer) instead");
}

} // namespace tessera
