#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <tessera/base/host_name.h>
#include <tessera/collectives/backends/simulated/operator_watch.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/plan/machine.h>

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;

/// The ranks that measure together; one alone without a process group.
class Measurement {
 public:
  explicit Measurement(const MeasureOptions& options) : options_(options) {
    if (is_initialized() && process_context().world_size() > 1)
      mesh_ = init_device_mesh(at::kCPU, {process_context().world_size()}, {"measured"});
    if (mesh_.defined()) communicator_ = mesh_.communicator();
  }

  int64_t ranks() const { return communicator_ ? communicator_->size() : 1; }
  Communicator& communicator() const { return *communicator_; }
  const DeviceMesh& mesh() const { return mesh_; } ///< undefined for one rank

  /// Seconds of the fastest of several calls, on the rank where these take longest. All ranks call together.
  double fastest(const std::function<void()>& call) const {
    call();
    double least = std::numeric_limits<double>::infinity();
    for (int i = 0; i < options_.repetitions; ++i) {
      if (communicator_) communicator_->barrier("measurement of a machine");
      const auto begin = Clock::now();
      call();
      least = std::min(least, std::chrono::duration<double>(Clock::now() - begin).count());
    }
    return largest(least);
  }

  double largest(double own) const {
    if (!communicator_) return own;
    auto value = at::full({1}, own, at::kDouble);
    communicator_->all_reduce(value, ReduceOp::kMax, "measurement of a machine").wait();
    return value.item<double>();
  }

 private:
  const MeasureOptions& options_;
  DeviceMesh mesh_;
  CommunicatorPtr communicator_;
};

double product_rate(const Measurement& measurement, int64_t size, at::ScalarType dtype) {
  const auto a = at::ones({size, size}, dtype), b = at::ones({size, size}, dtype);
  auto c = at::zeros({size, size}, dtype);
  const double seconds = measurement.fastest([&] { at::mm_out(c, a, b); });
  const auto n = static_cast<double>(size);
  return 2 * n * n * n / seconds;
}

/// Bytes a second of operators as a model has them beside its products: on a CPU most of them compute for longer than they wait
/// for memory.
double operator_rate(const Measurement& measurement, int64_t bytes) {
  constexpr int64_t kWidth = 256;
  const auto x = at::ones({std::max<int64_t>(1, bytes / 4 / kWidth), kWidth});
  auto y = at::zeros_like(x);
  const double seconds = measurement.fastest([&] {
    y.copy_(x);
    y.add_(x);
    at::gelu(x);
    at::softmax(x, -1);
    at::native_layer_norm(x, {kWidth}, {}, {}, 1e-5);
  });
  constexpr int kMoved = 2 + 3 + 2 + 2 + 2; // tensors that are read and written
  return kMoved * static_cast<double>(x.nbytes()) / seconds;
}

double attention_rate(const Measurement& measurement) {
  constexpr int64_t kHeads = 4, kPositions = 256, kHeadWidth = 64;
  const auto x = at::ones({1, kHeads, kPositions, kHeadWidth});
  const double seconds = measurement.fastest([&] { at::scaled_dot_product_attention(x, x, x); });
  return 4.0 * kHeads * kPositions * kPositions * kHeadWidth / seconds;
}

constexpr int64_t kSmall = 8;

/// Layers as a block of a model has them, whose kernels have nothing to do.
at::Tensor small_layers(const at::Tensor& input, const at::Tensor& matrix, const at::Tensor& scale) {
  constexpr int kLayers = 4;
  auto x = input; // [rows, time, features]
  for (int i = 0; i < kLayers; ++i) {
    const auto y = at::linear(at::layer_norm(x, {kSmall}, scale, scale), matrix);
    const auto heads = y.unflatten(-1, {2, kSmall / 2}).transpose(1, 2);
    x = x + at::linear(at::gelu(heads.transpose(1, 2).flatten(2)), matrix);
  }
  return x.sum();
}

/// Forward and backward of these, of plain tensors or of DTensors on `mesh`.
struct SmallPass {
  double seconds = 0;
  internal::OperatorCounts operators;
};

SmallPass small_pass(const Measurement& measurement, const DeviceMesh& mesh) {
  const auto made = [&](at::IntArrayRef sizes) {
    const auto ones = at::ones(sizes);
    return (mesh.defined() ? at::Tensor(from_local(ones, mesh, {Replicate()})) : ones).requires_grad_();
  };
  const auto input = made({1, 2, kSmall}), matrix = made({kSmall, kSmall}), scale = made({kSmall});
  const at::AutoGradMode with_grad(true);
  const auto call = [&] { small_layers(input, matrix, scale).backward(); };
  const double seconds = measurement.fastest(call);
  return {seconds, internal::count_operators(call)};
}

/// What a rank's operators take that compute nothing.
void measure_operators(const Measurement& measurement, Machine& machine) {
  const auto plain = small_pass(measurement, {});
  machine.launch_seconds = plain.seconds / static_cast<double>(plain.operators.kernels);
  if (measurement.ranks() == 1) return;
  const auto split = small_pass(measurement, measurement.mesh());
  machine.dtensor_seconds = std::max(0.0, split.seconds - plain.seconds) / static_cast<double>(split.operators.on_parts);
}

/// Bytes of memory that this process may take: the host's, or its control group's.
int64_t memory_of_host() {
  auto bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  for (const auto* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    int64_t limit = 0;
    if (std::ifstream(file) >> limit && limit > 0) bytes = std::min(bytes, limit); // "max" is no number
  }
  return bytes;
}

/// The link of a ring of n: an all-gather of S bytes takes (n - 1) alpha + (n - 1) / n S beta. The sum of the squared relative
/// errors is the least.
Link link_of(const Measurement& measurement, int64_t largest) {
  double ones = 0, bytes = 0, squares = 0, times = 0, products = 0;
  const auto ranks = static_cast<double>(measurement.ranks());
  for (int64_t size = 4096; size <= largest; size *= 4) {
    const auto part = at::ones({size / measurement.ranks()}, at::kByte);
    auto all = at::zeros({part.numel() * measurement.ranks()}, at::kByte);
    const double t =
        measurement.fastest([&] { measurement.communicator().all_gather_into(all, part, "measurement of a link").wait(); });
    const double x = (ranks - 1) / ranks * static_cast<double>(all.numel());
    ones += 1 / (t * t);
    bytes += x / (t * t);
    squares += x * x / (t * t);
    times += 1 / t;
    products += x / t;
  }
  const double determinant = ones * squares - bytes * bytes;
  const double beta = determinant > 0 ? std::max(0.0, (ones * products - bytes * times) / determinant) : 0;
  return {.alpha = std::max(0.0, (times - beta * bytes) / ones) / (ranks - 1), .beta = beta};
}

} // namespace

Machine measure_machine(const MeasureOptions& options) {
  TORCH_CHECK_VALUE(
      options.product_size >= 1 && options.operator_bytes >= 1 && options.repetitions >= 1 && options.message_bytes >= 4096,
      "measure_machine: product_size ", options.product_size, ", operator_bytes ", options.operator_bytes, " and repetitions ",
      options.repetitions, " must be positive, and message_bytes ", options.message_bytes, " at least 4096");
  const at::NoGradGuard no_grad;
  const Measurement measurement(options);
  Machine machine{.name = internal::host_name(), .ranks_a_host = measurement.ranks(), .device = Machine::Device::kCpu};
  machine.memory = memory_of_host() / measurement.ranks();
  machine.host_memory = memory_of_host();
  machine.fp32_flops = product_rate(measurement, options.product_size, at::kFloat);
  machine.attention_efficiency = std::min(1.0, attention_rate(measurement) / machine.fp32_flops);
  machine.bf16_flops = product_rate(measurement, options.product_size, at::kBFloat16);
  machine.memory_bandwidth = operator_rate(measurement, options.operator_bytes);
  measure_operators(measurement, machine);
  if (measurement.ranks() > 1) machine.in_host = link_of(measurement, options.message_bytes);
  return machine;
}

} // namespace tessera
