#include <tessera/fsdp/communication/float8_gather.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <absl/algorithm/container.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <memory>
#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/nn/float8_codes.h>
#include <tessera/nn/float8_linear.h>

namespace tessera {

namespace internal {

GatherExtension::Sent Float8Gather::before(const at::Tensor& shard, const DeviceMesh& /*mesh*/) {
  const auto scale = scale_of(shard);
  return {{(shard / scale).to(at::kFloat8_e4m3fn)}, scale};
}

at::Tensor Float8Gather::after(const std::vector<std::vector<at::Tensor>>& gathered, const std::any& metadata,
                               const at::Tensor& out) {
  const auto& scale = std::any_cast<const at::Tensor&>(metadata);
  std::vector<at::Tensor> rows; // put together first: a copy of each rank's would be as many kernels as there are ranks
  rows.reserve(gathered.size());
  for (const auto& rank : gathered) rows.push_back(rank[0]);
  const auto all = at::cat(rows);
  // Ranks that exist in name only send as many rows as this one does.
  const bool is_pretended = all.size(0) != out.size(0) && process_context().is_pretended();
  const auto held = is_pretended ? std::min(all.size(0), out.size(0)) : out.size(0);
  out.narrow(0, 0, held).copy_(is_pretended ? all.narrow(0, 0, held) : all);
  return out.mul_(scale); // by a power of two: exact in any dtype of 16 bits or more
}

std::vector<CommunicatorPtr> Float8Gather::communicators() const {
  std::vector<CommunicatorPtr> all;
  const auto held = parameter_.lock();
  const auto* const meta = held ? dtensor_meta(at::Tensor(held)) : nullptr;
  if (!meta) return all;
  const auto& spec = *meta->spec;
  for (size_t dim = 0; dim < spec.placements().size(); ++dim) {
    if (is_sharded(spec.placements()[dim])) all.push_back(spec.mesh().communicator(static_cast<int64_t>(dim), "fp8 scales"));
  }
  return all;
}

at::Tensor Float8Gather::largest_of(const at::Tensor& shard) {
  return largest_in_float8(shard.reshape({1, -1}), Float8Scaling::kTensor, 1).view({1});
}

void Float8Gather::reduce(const at::Tensor& largest, const std::vector<CommunicatorPtr>& communicators) {
  for (const auto& communicator : communicators) communicator->all_reduce(largest, ReduceOp::kMax, "fp8 scale").wait();
}

at::Tensor Float8Gather::scale_of(const at::Tensor& shard) const {
  if (known_ && known_->is_of(shard)) return known_->scale;
  const auto largest = largest_of(shard);
  reduce(largest, communicators());
  return float8_scale(largest, at::kFloat8_e4m3fn);
}

} // namespace internal

GatherExtensionFn float8_gather(const torch::nn::Module& module) {
  std::vector<at::Tensor> weights;
  const auto visit = [&](const torch::nn::Module& each) {
    const auto* const linear = each.as<torch::nn::LinearImpl>();
    const auto converted = linear ? internal::float8_weight(linear->weight) : std::nullopt;
    if (!converted) return;
    TORCH_CHECK_VALUE(converted->scaling == Float8Scaling::kTensor,
                      "float8_gather: a Linear has scales of rows, which each of its products takes anew from the whole weight: "
                      "convert it with Float8Scaling::kTensor, or leave float8_gather out");
    weights.push_back(converted->parameter);
  };
  visit(module);
  for (const auto& each : module.modules(/*include_self=*/false)) visit(*each);
  TORCH_CHECK_VALUE(!weights.empty(), "float8_gather: the module has no Linear in fp8; call convert_to_float8 before");
  return [weights = std::move(weights)](const std::string&, const at::Tensor& parameter) -> std::shared_ptr<GatherExtension> {
    const bool is_one = absl::c_any_of(weights, [&](const auto& weight) { return weight.is_same(parameter); });
    return is_one ? std::make_shared<internal::Float8Gather>(parameter) : nullptr;
  };
}

} // namespace tessera
