#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <absl/algorithm/container.h>
#include <torch/nn/modules/linear.h>

#include <utility>

#include <tessera/fsdp/gather_extension.h>
#include <tessera/nn/float8_linear.h>

namespace tessera {

namespace {

class Float8Gather final : public GatherExtension {
 public:
  Sent before(const at::Tensor& shard, const DeviceMesh& mesh) override {
    auto largest = internal::largest_in_float8(shard.reshape({1, -1}), Float8Scaling::kTensor, 1).view({1});
    mesh.communicator(mesh.ndim() - 1, "fp8 scales")->all_reduce(largest, ReduceOp::kMax, "fp8 scale").wait();
    const auto scale = internal::float8_scale(largest, at::kFloat8_e4m3fn);
    return {{(shard / scale).to(at::kFloat8_e4m3fn)}, scale};
  }

  at::Tensor after(const std::vector<std::vector<at::Tensor>>& gathered, const std::any& metadata,
                   const at::Tensor& out) override {
    const auto& scale = std::any_cast<const at::Tensor&>(metadata);
    int64_t row = 0;
    for (const auto& rank : gathered) {
      const auto rows = out.narrow(0, row, rank[0].size(0));
      rows.copy_(rank[0]).mul_(scale); // by a power of two: exact in any dtype of 16 bits or more
      row += rows.size(0);
    }
    return out;
  }
};

} // namespace

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
  return [weights = std::move(weights), extension = std::make_shared<Float8Gather>()](
             const std::string&, const at::Tensor& parameter) -> std::shared_ptr<GatherExtension> {
    const bool is_one = absl::c_any_of(weights, [&](const auto& weight) { return weight.is_same(parameter); });
    return is_one ? extension : nullptr;
  };
}

} // namespace tessera
