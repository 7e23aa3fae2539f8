#include <ATen/core/dispatch/Dispatcher.h>

#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/patterns.h>

namespace tessera::internal::rules {

namespace {

/// The last dims that a layer norm takes the statistics over.
size_t normalized_dims(const OpCall& call) { return call.integers("normalized_shape").size(); }

/// The dims before them are a batch. input, weight, bias → output, mean, 1 / standard deviation.
Factorization layer_norm(const OpCall& call) {
  const std::string row(normalized_dims(call), '*'), ones(normalized_dims(call), '*');
  return pattern_factors(call, "..." + row + "," + row + "," + row + "->..." + row + ",..." + ones + ",..." + ones);
}

/// The statistics' dims of size 1 come after the batch dims. Weight and bias gradients are sums over the batch.
Factorization layer_norm_backward(const OpCall& call) {
  const auto k = normalized_dims(call);
  const auto ndim = call.tensors[0].sizes.size();
  std::string batch;
  for (size_t d = 0; d + k < ndim; ++d) batch += static_cast<char>('a' + d);
  const std::string row(k, '*');
  const auto whole = batch + row;
  const auto statistics = call.tensors[2].sizes.size() == ndim ? whole : batch;
  const bool rms = call.name.find("rms") != std::string::npos;
  auto pattern =
      whole + "," + whole + "," + statistics + "," + (rms ? row : statistics + "," + row + "," + row) + "->" + whole + "," + row;
  if (!rms) pattern += "," + row;
  return pattern_factors(call, pattern, batch);
}

/// The number of rows, as group_norm takes it, is that of this rank's part.
void group_norm_local(const LocalCall& call) {
  if (call.arg(0).toTensor().dim() > 0) *call.find("N") = call.arg(0).toTensor().size(0);
  call.op.callBoxed(*call.stack);
}

/// Kernels update running statistics in place, of which schemas need not tell and a copy would know nothing: they stay as they
/// are.
void check_running_statistics(const OpCall& call) {
  for (const auto& tensor : call.tensors) {
    const auto& argument = call.schema.arguments()[tensor.argument].name();
    if (!tensor.defined || (argument != "running_mean" && argument != "running_var")) continue;
    TORCH_CHECK(tensor.spec->is_replicated(), call.name, ": running statistics must be replicated to be updated, not ",
                to_string(tensor.spec->placements()));
  }
}

/// A channel's statistics are over the whole batch.
Factorization batch_norm(const OpCall& call) {
  const bool training = call.flag("training", call.name.find("with_update") != std::string::npos);
  const auto& running = call.tensors[3];
  if (!training) { // no statistics come out
    auto factors = pattern_factors(call, "nc~,c,c,c,c->nc~,*,*,*");
    for (auto& factor : factors.factors) factor.reduction = Replicate{};
    return factors;
  }
  if (!running.defined) return pattern_factors(call, "*c~,c,c,c,c->*c~,c,c,*");
  check_running_statistics(call);
  return pattern_factors(call, "**~,*,*,*,*->**~,*,*,*");
}

constexpr PatternLine kChannels[] = {
    {"_native_batch_norm_legit.no_stats", "*c~,c,c->*c~,c,c"},
    {"batch_norm_backward", "*c~,*c~,c,c,c,c,c,*->*c~,c,c"},
    {"native_batch_norm_backward", "*c~,*c~,c,c,c,c,c->*c~,c,c"},
};

} // namespace

Factorization whole_without_rule(const OpCall& call) {
  const bool updates = call.name.find("_backward") == std::string::npos && call.flag("training", true);
  if (updates) check_running_statistics(call);
  return whole_factors(call);
}

void register_normalization(Registry& registry) {
  add_patterns(registry, kChannels);
  registry.add(
      "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update "
      "_batch_norm_no_update",
      OnLocals(batch_norm));
  registry.add("native_layer_norm", OnLocals(layer_norm).with(Trait::kOwnEmptyShapes));
  registry.add("_fused_rms_norm", OnLocals([](const OpCall& call) {
                 const std::string row(normalized_dims(call), '*');
                 return pattern_factors(call, "..." + row + "," + row + "->..." + row + ",..." + row);
               }));
  registry.add("native_layer_norm_backward _fused_rms_norm_backward", OnLocals(layer_norm_backward));
  registry.add("native_group_norm", OnLocals(by_pattern("n~,*,*->n~,n*,n*")).run(group_norm_local));
  registry.add("native_group_norm_backward", OnLocals(by_pattern("n~,n~,n*,n*,*->n~,*,*", "n")).run(group_norm_local));
}

} // namespace tessera::internal::rules
