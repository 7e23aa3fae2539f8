#include <tessera/nn/average_buffers.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <utility>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/nn/follow_scripts.h>

namespace tessera {

namespace {

constexpr int64_t kSummedAtOnce = int64_t{1} << 22; // doubles: a model's small buffers go in one message

struct Buffer {
  std::string name;
  at::Tensor tensor;
  bool has_mean() const { return tensor.is_floating_point() || tensor.is_complex(); }
};

std::vector<Buffer> plain_buffers(const torch::nn::Module& module) {
  internal::follow_scripts(module);
  std::vector<Buffer> buffers;
  for (const auto& item : module.named_buffers()) {
    const auto& tensor = item.value();
    if (!tensor.defined() || internal::dtensor_meta(tensor)) continue;
    buffers.push_back({item.key(), tensor});
  }
  return buffers;
}

/// Why it cannot be averaged; "" where it can.
std::string problem_of(const at::Tensor& buffer) {
  if (buffer.is_meta()) return "on the meta device";
  if (buffer.layout() != at::kStrided) return "not dense";
  return "";
}

std::string describe(const Buffer& buffer) {
  const auto problem = problem_of(buffer.tensor);
  return fmt::format("{} {}[{}]{}{}", buffer.name, c10::toString(buffer.tensor.scalar_type()),
                     fmt::join(buffer.tensor.sizes(), ", "), problem.empty() ? "" : ", ", problem);
}

void check_same_buffers(const std::string& function, const std::vector<Buffer>& buffers, Communicator& communicator,
                        at::Device device) {
  std::string text;
  for (const auto& buffer : buffers) text += describe(buffer) + "\n";
  const auto texts = internal::gather_texts_that_differ(text, communicator, device, function);
  TORCH_CHECK_VALUE(texts.empty(), function,
                    ": the ranks' buffers differ: ", internal::first_difference(texts, communicator.ranks(), "buffer"));
  for (const auto& buffer : buffers) {
    const auto problem = problem_of(buffer.tensor);
    TORCH_CHECK_VALUE(problem.empty(), function, ": the buffer ", buffer.name, " is ", problem);
  }
}

at::Tensor as_real(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor; }

/// Takes the means of `buffers` in one message.
void take_means(const std::vector<Buffer>& buffers, Communicator& communicator, const at::TensorOptions& options) {
  if (buffers.empty()) return;
  std::vector<at::Tensor> flat;
  for (const auto& buffer : buffers) flat.push_back(as_real(buffer.tensor.detach()).to(options.dtype(at::kDouble)).reshape({-1}));
  auto values = at::cat(flat);
  communicator.all_reduce(values, ReduceOp::kAvg, "the mean of " + buffers.front().name + ", …").wait();
  int64_t begin = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto& tensor = buffers[i].tensor;
    const auto mean = values.narrow(0, begin, flat[i].numel());
    begin += flat[i].numel();
    if (tensor.is_complex()) {
      tensor.detach().copy_(at::view_as_complex(mean.clone().view({-1, 2})).view(tensor.sizes()));
    } else {
      tensor.detach().copy_(mean.view(tensor.sizes()));
    }
  }
}

void take_first(const Buffer& buffer, Communicator& communicator, const at::TensorOptions& options) {
  const auto values = buffer.tensor.detach()
                          .to(options.device(), buffer.tensor.scalar_type(), /*non_blocking=*/false,
                              /*copy=*/true)
                          .contiguous();
  communicator.broadcast(values, 0, buffer.name).wait();
  buffer.tensor.detach().copy_(values);
}

CommunicatorPtr communicator_of(const std::string& function, const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(mesh.defined(), function, ": the mesh is undefined; make one with init_device_mesh");
  TORCH_CHECK_VALUE(mesh.coordinate().has_value(), function, ": this rank is outside the mesh ", mesh.to_string());
  return mesh.flatten().communicator();
}

} // namespace

void broadcast_buffers(torch::nn::Module& module, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const auto communicator = communicator_of("broadcast_buffers", mesh);
  const auto buffers = plain_buffers(module);
  check_same_buffers("broadcast_buffers", buffers, *communicator, mesh.device());
  for (const auto& buffer : buffers) take_first(buffer, *communicator, at::TensorOptions(mesh.device()));
}

void average_buffers(torch::nn::Module& module, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const auto communicator = communicator_of("average_buffers", mesh);
  const at::TensorOptions options(mesh.device());
  const auto buffers = plain_buffers(module);
  check_same_buffers("average_buffers", buffers, *communicator, mesh.device());
  std::vector<Buffer> together;
  int64_t numel = 0;
  for (const auto& buffer : buffers) {
    if (!buffer.has_mean()) {
      take_first(buffer, *communicator, options);
      continue;
    }
    together.push_back(buffer);
    numel += buffer.tensor.numel();
    if (numel >= kSummedAtOnce) {
      take_means(std::exchange(together, {}), *communicator, options);
      numel = 0;
    }
  }
  take_means(together, *communicator, options);
}

} // namespace tessera
