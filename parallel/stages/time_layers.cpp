#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include <tessera/parallel/pipeline_layers.h>
#include <tessera/parallel/stages/names.h>
#include <tessera/parallel/stages/value_tree.h>

namespace tessera {

using internal::pipeline::tensors_of, internal::pipeline::with_tensors;

namespace {

/// The members of a layer. While it lives, those that are on the meta device have memory.
class Members {
 public:
  Members(const PipelineLayers& layers, const PipelineLayers::Layer& layer, c10::Device device) {
    const at::NoGradGuard no_grad;
    const internal::pipeline::ModelNames names(layers.model());
    for (const auto& member : layer.members) {
      for (const auto& name : names.tensors_below(member)) {
        const auto parameter = names.parameters.find(name);
        const auto& tensor = parameter != names.parameters.end() ? parameter->second : names.buffers.at(name);
        if (tensor.is_meta()) give_memory(tensor, device);
        if (tensor.requires_grad()) trained_.push_back(tensor);
      }
    }
  }
  ~Members() {
    for (auto& [tensor, meta] : before_) tensor.unsafeGetTensorImpl()->shallow_copy_from(meta);
  }
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  const std::vector<at::Tensor>& trained() const { return trained_; }

 private:
  void give_memory(const at::Tensor& tensor, c10::Device device) {
    auto* const impl = tensor.unsafeGetTensorImpl();
    before_.emplace_back(tensor, impl->shallow_copy_and_detach(c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
    impl->shallow_copy_from(at::zeros_like(tensor, tensor.options().device(device)).getIntrusivePtr());
  }

  std::vector<at::Tensor> trained_;
  std::vector<std::pair<at::Tensor, c10::intrusive_ptr<c10::TensorImpl>>> before_;
};

at::Tensor without_graph(const at::Tensor& tensor) { return tensor.defined() ? tensor.detach() : tensor; }

/// Runs the layer forward and backward. Returns its output without a graph.
PipelineValue run(const PipelineLayers::Layer& layer, const std::vector<at::Tensor>& trained, const PipelineValue& input,
                  const PipelineValue& micro_batch) {
  auto wanted = trained;
  const auto fresh = with_tensors(input, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_floating_point()) return tensor;
    wanted.push_back(tensor.detach().requires_grad_());
    return wanted.back();
  });
  const auto output = layer.function(fresh, micro_batch);
  std::vector<at::Tensor> roots, gradients;
  for (const auto& tensor : tensors_of(output)) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    roots.push_back(tensor);
    gradients.push_back(at::ones_like(tensor));
  }
  if (!roots.empty() && !wanted.empty()) {
    torch::autograd::grad(roots, wanted, gradients, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
  }
  return with_tensors(output, without_graph);
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

} // namespace

std::vector<double> time_layers(const PipelineLayers& layers, const PipelineValue& micro_batch, const DeviceMesh& mesh,
                                int64_t repeats) {
  TORCH_CHECK_VALUE(repeats >= 1, "time_layers: ", repeats, " repeats, and 1 is the least");
  constexpr int64_t kWarmUp = 2;
  std::vector<double> seconds;
  auto value = micro_batch;
  for (const auto& layer : layers.layers()) {
    const Members members(layers, layer, mesh.device());
    PipelineValue output;
    double start = now();
    for (int64_t i = 0; i < kWarmUp + repeats; ++i) {
      if (i == kWarmUp) start = now();
      output = run(layer, members.trained(), value, micro_batch);
    }
    seconds.push_back((now() - start) / static_cast<double>(repeats));
    value = output;
  }
  const auto here = at::from_blob(seconds.data(), {std::ssize(seconds)}, at::kDouble);
  const auto all = here.to(mesh.device());
  mesh.communicator(0, "pipeline")->all_reduce(all, ReduceOp::kAvg, "times of a pipeline's layers").wait();
  if (!all.is_same(here)) here.copy_(all);
  return seconds;
}

} // namespace tessera
