#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones_like.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tessera/activations/kept_decision.h>
#include <tessera/collectives/process_context.h>
#include <tessera/parallel/experts.h>

namespace tessera {

namespace {

/// The scores of each token as probabilities, which those of a softmax are.
at::Tensor probabilities(const Routing& routing) {
  return routing.scores / routing.scores.sum(1, /*keepdim=*/true).clamp_min(1e-20);
}

double experts_of(const Routing& routing) { return static_cast<double>(routing.scores.size(1)); }
double top_k_of(const Routing& routing) { return static_cast<double>(routing.experts.size(1)); }

struct InjectLoss : torch::autograd::Function<InjectLoss> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& output, const at::Tensor& loss,
                            double scale) {
    context->saved_data["scale"] = scale;
    context->saved_data["options"] = at::empty({0}, loss.options());
    return output.view_as(output);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto like = context->saved_data["options"].toTensor();
    return {gradients[0], at::full({}, context->saved_data["scale"].toDouble(), like.options()), {}};
  }
};

} // namespace

TokenCounts count_tokens(const Routing& routing, const DeviceMesh& mesh, double loss_ranks) {
  const at::NoGradGuard no_grad;
  TokenCounts all{.counts = routing.counts, .tokens = static_cast<double>(routing.experts.size(0))};
  if (!mesh.defined() || mesh.size() == 1) return all;
  const auto add = [&] {
    const auto tokens = at::full({1}, routing.experts.size(0), routing.counts.options());
    const auto sums = at::cat({routing.counts, tokens}).to(mesh.device());
    const auto communicator = process_context().communicator(mesh.rank_list(), mesh.device_type(), "experts.counts");
    communicator->all_reduce(sums, ReduceOp::kSum, c10::str("counts of ", routing.counts.numel(), " experts")).wait();
    return std::vector{sums};
  };
  const auto sums = internal::decided_once(add)[0]; // a second run of recompute sends nothing
  all.counts = sums.narrow(0, 0, routing.counts.numel());
  all.tokens = static_cast<double>(sums[-1].item<int64_t>());
  all.ranks = loss_ranks > 0 ? loss_ranks : static_cast<double>(mesh.size());
  return all;
}

at::Tensor load_balancing_loss(const Routing& routing, const TokenCounts& all) {
  const auto counts = all.counts.to(routing.scores.options());
  const auto sums = probabilities(routing).sum(0);
  if (all.tokens == 0) return (sums * 0).sum();
  return (sums * counts).sum() * (experts_of(routing) * all.ranks / (top_k_of(routing) * all.tokens * all.tokens));
}

at::Tensor sequence_balancing_loss(const Routing& routing, int64_t sequences) {
  const auto tokens = routing.scores.size(0), experts = routing.scores.size(1);
  TORCH_CHECK_VALUE(sequences >= 0 && (sequences == 0 ? tokens == 0 : tokens % sequences == 0),
                    "sequence_balancing_loss: ", tokens, " tokens are not ", sequences, " sequences of one length");
  if (tokens == 0) return (routing.scores * 0).sum();
  const auto sums = probabilities(routing).view({sequences, -1, experts}).sum(1);
  const auto first = at::arange(sequences, routing.experts.options()).mul_(experts).view({-1, 1, 1});
  const auto chosen = routing.experts.view({sequences, -1, routing.experts.size(1)});
  const auto places = (chosen + first).masked_fill(chosen.lt(0), sequences * experts); // behind all for those that were dropped
  const auto counts = at::bincount(places.flatten(), {}, sequences * experts + 1).narrow(0, 0, sequences * experts);
  const int64_t time = tokens / sequences;
  const auto length = static_cast<double>(time);
  const auto products = sums * counts.view({sequences, experts}).to(sums.scalar_type());
  return products.sum() * (experts_of(routing) / (top_k_of(routing) * length * length * static_cast<double>(sequences)));
}

namespace {

/// [sequences, experts + 1] over all ranks: the tokens that chose each expert, and all.
at::Tensor counts_by_sequence(const Routing& routing, const TokenSequences& sequences) {
  const at::NoGradGuard no_grad;
  const auto experts = routing.scores.size(1), places = sequences.count * experts;
  const auto add = [&] {
    const auto own = sequences.of_token.mul(experts).unsqueeze(1).add(routing.experts).masked_fill(routing.experts.lt(0), places);
    const auto chosen = at::bincount(own.flatten(), {}, places + 1).narrow(0, 0, places).view({sequences.count, experts});
    const auto tokens = at::bincount(sequences.of_token, {}, sequences.count).unsqueeze(1);
    const auto counts = at::cat({chosen, tokens}, 1).to(sequences.ranks.device());
    const auto communicator =
        process_context().communicator(sequences.ranks.rank_list(), sequences.ranks.device_type(), "experts.counts");
    communicator->all_reduce(counts, ReduceOp::kSum, c10::str("counts of ", sequences.count, " sequences")).wait();
    return std::vector{counts};
  };
  return internal::decided_once(add)[0]; // a second run of recompute sends nothing
}

} // namespace

at::Tensor sequence_balancing_loss(const Routing& routing, const TokenSequences& sequences) {
  if (!sequences.ranks.defined()) return sequence_balancing_loss(routing, sequences.count);
  const auto tokens = routing.scores.size(0), experts = routing.scores.size(1);
  TORCH_CHECK_VALUE(sequences.of_token.defined() && sequences.of_token.numel() == tokens, "sequence_balancing_loss: ", tokens,
                    " tokens, but the sequences of ", sequences.of_token.defined() ? sequences.of_token.numel() : 0);
  if (sequences.count == 0) return (routing.scores * 0).sum();
  const auto all = counts_by_sequence(routing, sequences).to(routing.scores.options());
  const auto lengths = all.narrow(1, experts, 1).clamp_min(1);
  const auto numbers = at::arange(sequences.count, sequences.of_token.options()).unsqueeze(1);
  const auto of_sequence = sequences.of_token.unsqueeze(0).eq(numbers).to(routing.scores.scalar_type()); // adds in a fixed order
  const auto products = of_sequence.mm(probabilities(routing)) / lengths * (all.narrow(1, 0, experts) / lengths);
  return products.sum() *
         (experts_of(routing) * sequences.loss_ranks / (top_k_of(routing) * static_cast<double>(sequences.count)));
}

at::Tensor router_z_loss(const at::Tensor& logits, const TokenCounts& all) {
  const auto wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  return at::logsumexp(wide, 1).square().sum() * (all.tokens == 0 ? 0.0 : all.ranks / all.tokens);
}

at::Tensor inject_loss(const at::Tensor& output, const at::Tensor& loss, double scale) {
  TORCH_CHECK_VALUE(loss.dim() == 0, "inject_loss: the loss has the shape ", loss.sizes(), ", but must have no dims");
  return InjectLoss::apply(output, loss, scale);
}

} // namespace tessera
