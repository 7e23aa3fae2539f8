#include <tessera/nn/batch_statistics.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <tuple>
#include <vector>

#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// Half precision would round the sums of many rows.
at::ScalarType compute_dtype(const at::Tensor& input) { return input.element_size() < 4 ? at::kFloat : input.scalar_type(); }

/// Statistics of the rows of all ranks, the same bits on every one of them.
struct Statistics {
  at::Tensor mean, var; ///< [C], in double; biased
  int64_t count = 0;    ///< values a channel
};

/// What a rank says of its forward, as bits.
enum Said : int { kWrongInput = 1, kRecordsGraph = 2, kNeedsGradient = 4 };

/// One batch of all ranks.
struct Batch {
  at::Tensor x; ///< this rank's rows, in the dtype that is computed in
  Statistics statistics;
  bool any_wrong = false, any_needs_gradient = false;
  int64_t without_graph = -1; ///< a rank that runs without grad mode
};

int64_t values_a_channel(const at::Tensor& x) {
  int64_t count = x.size(0);
  for (int64_t dim = 2; dim < x.dim(); ++dim) count *= x.size(dim);
  return count;
}

/// Merges the ranks' means and variances, as Chan's formula does: sums of squares would cancel.
Statistics merge(const at::Tensor& by_rank, int64_t channels, int64_t count) {
  const auto shares = by_rank.narrow(1, 2 * channels, 1) / count;
  const auto means = by_rank.narrow(1, 0, channels), vars = by_rank.narrow(1, channels, channels);
  const auto mean = (shares * means).sum(0);
  return {mean, (shares * (vars + (means - mean).square())).sum(0), count};
}

Batch batch_of(const at::Tensor& x, int said, const BatchRanks& ranks) {
  const auto channels = x.size(1);
  const auto options = x.options().dtype(at::kDouble);
  const auto own = at::zeros({2 * channels + 2}, options);
  own[2 * channels].fill_(values_a_channel(x));
  own[2 * channels + 1].fill_(said);
  if (x.numel() > 0) {
    const auto [mean, var] = at::batch_norm_update_stats(x, {}, {}, 0);
    own.narrow(0, 0, channels).copy_(mean);
    own.narrow(0, channels, channels).copy_(var);
  }
  auto by_rank = at::empty({ranks.communicator->size() * own.numel()}, options);
  ranks.communicator->all_gather_into(by_rank, own, ranks.label).wait();
  by_rank = by_rank.view({ranks.communicator->size(), -1});

  Batch batch{x, {}};
  const auto counts_and_said = by_rank.narrow(1, 2 * channels, 2).cpu();
  const auto of_rank = counts_and_said.accessor<double, 2>();
  int64_t count = 0;
  for (int rank = 0; rank < ranks.communicator->size(); ++rank) {
    const auto bits = static_cast<int>(of_rank[rank][1]);
    count += static_cast<int64_t>(of_rank[rank][0]);
    batch.any_wrong |= (bits & kWrongInput) != 0;
    batch.any_needs_gradient |= (bits & kNeedsGradient) != 0;
    if ((bits & kRecordsGraph) == 0) batch.without_graph = ranks.communicator->ranks()[static_cast<size_t>(rank)];
  }
  batch.statistics = merge(by_rank, channels, count);
  return batch;
}

void move_towards(const at::Tensor& running, const at::Tensor& value, double momentum) {
  running.mul_(1 - momentum).add_(value.to(running.scalar_type()), momentum);
}

void update_running(const BatchNormArguments& arguments, const Statistics& batch) {
  if (!arguments.running_mean.defined() || batch.count == 0) return;
  const auto count = static_cast<double>(batch.count);
  move_towards(arguments.running_mean, batch.mean, arguments.momentum);
  move_towards(arguments.running_var, batch.var * (count / (count - 1)), arguments.momentum);
}

/// (x - mean) / sqrt(var + eps) × weight + bias, in one pass.
at::Tensor normalize(const at::Tensor& x, const at::Tensor& mean, const at::Tensor& var, const at::Tensor& weight,
                     const at::Tensor& bias, double eps) {
  return std::get<0>(at::native_batch_norm(x, weight, bias, mean, var, /*training=*/false, /*momentum=*/0, eps));
}

/// What a rank's rows alone say about the gradients.
struct Gradients {
  at::Tensor input, weight, bias;
};

Gradients gradients_of_rows(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean,
                            const at::Tensor& var, double eps) {
  if (x.numel() == 0) return {at::zeros_like(x), at::zeros_like(mean), at::zeros_like(mean)};
  const auto none = at::empty({0}, mean.options()); // saved by a forward; CUDA's kernel asks for tensors
  auto [dx, dw, db] = at::native_batch_norm_backward(gradient, x, weight, mean, var, none, none, /*train=*/false, eps,
                                                     /*output_mask=*/{true, true, true});
  return {std::move(dx), std::move(dw), std::move(db)};
}

class BatchNormOverRanks : public torch::autograd::Function<BatchNormOverRanks> {
 public:
  /// `anchor` makes a node of a forward that nothing here needs a gradient of: its backward is another rank's too.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& anchor, const BatchRanks& ranks, const Batch& batch, double eps) {
    const auto& x = batch.x;
    const auto mean = batch.statistics.mean.to(x.scalar_type()), var = batch.statistics.var.to(x.scalar_type());
    context->save_for_backward({input, weight, mean, var});
    context->saved_data["eps"] = eps;
    context->saved_data["count"] = batch.statistics.count;
    context->saved_data["communicates"] = batch.any_needs_gradient;
    context->saved_data["without_graph"] = batch.without_graph;
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<Group>(ranks));
    if (x.numel() == 0) return at::zeros_like(input);
    return normalize(x, mean, var, weight, bias, eps).to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& outputs) {
    const auto group = c10::static_intrusive_pointer_cast<Group>(context->saved_data["group"].toCapsule());
    TORCH_CHECK(!at::GradMode::is_enabled(), group->ranks.label, ": its gradient cannot be differentiated again (create_graph)");
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1], &mean = saved[2], &var = saved[3];
    const auto x = input.to(mean.scalar_type());
    const auto eps = context->saved_data["eps"].toDouble();
    auto own = gradients_of_rows(outputs[0].to(x.scalar_type()), x, weight, mean, var, eps);
    if (context->saved_data["communicates"].toBool()) {
      const auto without_graph = context->saved_data["without_graph"].toInt();
      TORCH_CHECK(without_graph < 0, group->ranks.label, ": its backward runs on all ranks, but rank ", without_graph,
                  " ran the forward without grad mode");
      const auto means = mean_gradients(own, group->ranks, context->saved_data["count"].toInt());
      const auto scale = -weight * (var + eps).rsqrt();
      if (x.numel() > 0) own.input += normalize(x, mean, var, scale * means[1], scale * means[0], eps);
    }
    const auto of_parameter = [&](size_t i, const at::Tensor& value) {
      return context->needs_input_grad(i) ? value : Variable();
    };
    return {own.input.to(input.scalar_type()), of_parameter(1, own.weight), of_parameter(2, own.bias), {}, {}, {}, {}};
  }

 private:
  struct Group : torch::CustomClassHolder {
    explicit Group(BatchRanks of) : ranks(std::move(of)) {}
    BatchRanks ranks;
  };

  /// Means over all values of a channel, of the output's gradient and of its product with the normalized input: [2, C].
  static at::Tensor mean_gradients(const Gradients& own, const BatchRanks& ranks, int64_t count) {
    const auto sums = at::stack({own.bias, own.weight}).to(at::kDouble);
    ranks.communicator->all_reduce(sums, ReduceOp::kSum, ranks.label + " backward").wait();
    return (sums / count).to(own.input.scalar_type());
  }
};

/// A parameter as a plain tensor like `x`, or `otherwise` for each of the channels. The view makes a sharded one whole, in every
/// grad mode.
at::Tensor plain(const at::Tensor& parameter, const at::Tensor& x, double otherwise) {
  if (parameter.defined()) return parameter.view({-1}).to(x.scalar_type());
  return at::full({x.size(1)}, otherwise, x.options());
}

/// What is wrong with this rank's input; "" where nothing is.
std::string problem_of(const at::Tensor& input, int64_t channels) {
  if (!input.defined()) return "expected an input, but got an undefined tensor";
  if (input.dim() < 2 || input.size(1) != channels)
    return c10::str("expected an input [N, ", channels, ", …], but got the shape ", input.sizes());
  if (!input.is_floating_point()) return c10::str("expected a floating-point input, but got ", input.scalar_type());
  if (dtensor_meta(input)) {
    return "expected this rank's rows as a plain tensor, but got a DTensor (whose batch norm has the statistics of the whole "
           "batch by itself)";
  }
  return input.is_meta() ? "expected values, but got a meta tensor" : "";
}

/// Tells every rank what was wrong on which one. Every rank calls it.
[[noreturn]] void throw_problems(const std::string& problem, const BatchRanks& ranks, at::Device device) {
  auto& communicator = *ranks.communicator;
  const auto problems = gather_texts(problem, communicator, device, ranks.label);
  std::vector<std::string> texts;
  for (size_t i = 0; i < problems.size(); ++i) {
    if (!problems[i].empty()) texts.push_back(c10::str(problems[i], " on rank ", communicator.ranks()[i]));
  }
  C10_THROW_ERROR(ValueError, fmt::format("{}: {}", ranks.label, fmt::join(texts, "; ")));
}

/// The batch of all ranks, whose statistics the running ones have taken in. It keeps no graph.
Batch take_batch(const BatchRanks& ranks, const at::Tensor& input, const at::Tensor& x, const std::string& problem,
                 const BatchNormArguments& arguments) {
  const int said = (problem.empty() ? 0 : kWrongInput) | (at::GradMode::is_enabled() ? kRecordsGraph : 0) |
                   (at::GradMode::is_enabled() && problem.empty() && input.requires_grad() ? kNeedsGradient : 0);
  const at::NoGradGuard no_grad;
  auto batch = batch_of(x, said, ranks);
  if (batch.any_wrong) throw_problems(problem, ranks, x.device());
  TORCH_CHECK_VALUE(batch.statistics.count != 1, ranks.label, ": expected more than 1 value per channel when training, but all ",
                    "ranks together have 1: this one's input has the shape ", input.sizes());
  update_running(arguments, batch.statistics);
  return batch;
}

} // namespace

BatchRanks batch_ranks(const DeviceMesh& mesh, const std::string& label, const char* function) {
  TORCH_CHECK_VALUE(mesh.defined(), function, ": the mesh is undefined; make one with init_device_mesh");
  TORCH_CHECK_VALUE(mesh.coordinate().has_value(), function, ": this rank is outside the mesh ", mesh.to_string());
  return {mesh.flatten().communicator(0, "batch_norm"), label};
}

at::Tensor batch_norm_over(const BatchRanks& ranks, const at::Tensor& input, const BatchNormArguments& arguments) {
  const auto problem = problem_of(input, arguments.channels);
  TORCH_CHECK_VALUE(problem.empty() || arguments.uses_batch, ranks.label, ": ", problem);
  // A rank with a wrong input does what the others do, with no rows, until they know.
  const auto x = problem.empty() ? input.detach().to(compute_dtype(input))
                                 : at::empty({0, arguments.channels}, at::TensorOptions(ranks.communicator->device_type()));
  const auto weight = plain(arguments.weight, x, 1), bias = plain(arguments.bias, x, 0);
  if (!arguments.uses_batch) {
    return at::batch_norm(input, weight, bias, arguments.running_mean.to(x.scalar_type()),
                          arguments.running_var.to(x.scalar_type()), /*training=*/false, arguments.momentum, arguments.eps,
                          /*cudnn_enabled=*/false);
  }
  const auto batch = take_batch(ranks, input, x, problem, arguments);
  const auto anchor = at::empty({0}, x.options());
  if (batch.any_needs_gradient && at::GradMode::is_enabled()) anchor.requires_grad_();
  return BatchNormOverRanks::apply(input, weight, bias, anchor, ranks, batch, arguments.eps);
}

} // namespace tessera::internal
