#include <tessera/parallel/moe.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string_view>
#include <utility>

#include <tessera/activations/recomputation.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/parallel/experts/check_choice.h>
#include <tessera/parallel/experts/expert_weights.h>
#include <tessera/parallel/experts/token_rows.h>

namespace tessera {

using internal::experts::TokenRows;

namespace {

void check(const MoEOptions& options) {
  const auto positive = [](const char* name, int64_t value) {
    TORCH_CHECK_VALUE(value > 0, "MoE: ", name, " is ", value, ", but must be positive");
  };
  positive("width", options.width);
  positive("hidden", options.hidden);
  positive("experts", options.experts);
  TORCH_CHECK_VALUE(options.shared_hidden >= 0, "MoE: shared_hidden is ", options.shared_hidden);
  TORCH_CHECK_VALUE(options.losses.balance >= 0 && options.losses.z >= 0, "MoE: the coefficients of losses are ",
                    options.losses.balance, " and ", options.losses.z, ", but must not be negative");
  TORCH_CHECK_VALUE(options.bias_rate >= 0, "MoE: bias_rate is ", options.bias_rate, ", but must not be negative");
  internal::experts::check_choice(options.route, options.experts);
}

/// Draws a seed from LibTorch's generator.
uint64_t next_seed() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

/// This rank's experts among a list.
std::vector<std::shared_ptr<torch::nn::Module>> own_of(const torch::nn::ModuleListImpl& list, const DeviceMesh& mesh) {
  const auto own = static_cast<int64_t>(list.size()) / (mesh.defined() ? mesh.size() : 1);
  const auto first = list.begin() + (mesh.defined() ? mesh.local_rank() * own : 0);
  return {first, first + own};
}

} // namespace

MoEImpl::MoEImpl(const MoEOptions& options) : options_((check(options), options)), seed_(next_seed()) {
  router_ = register_module("router", Router(options.width, options.experts, options.bias_rate > 0));
  if (options.storage == ExpertStorage::kStacked) {
    experts_ = std::make_shared<StackedExpertsImpl>(options.experts, options.width, options.hidden, options.kind);
  } else {
    const auto list = std::make_shared<torch::nn::ModuleListImpl>();
    for (int64_t i = 0; i < options.experts; ++i) list->push_back(FeedForward(options.width, options.hidden, options.kind));
    experts_ = list;
  }
  register_module("experts", experts_);
  if (options.shared_hidden > 0)
    shared_ = register_module("shared", FeedForward(options.width, options.shared_hidden, options.kind));
  reset_parameters();
}

void MoEImpl::reset_parameters() {
  using internal::experts::draw_weights, internal::experts::seed_of, internal::experts::WeightKind;
  enum Place : uint64_t { kRouter, kShared, kExperts };
  static constexpr std::array<std::string_view, 3> kWeights{"gate", "up", "down"};
  const auto draw = [](const torch::nn::Module& module, WeightKind kind, auto seed_of_weight) {
    for (const auto& item : module.named_parameters()) {
      const auto name = item.key().substr(0, item.key().find('.'));
      const auto place = std::find(kWeights.begin(), kWeights.end(), name) - kWeights.begin();
      draw_weights(item.value(), kind, seed_of_weight(static_cast<uint64_t>(place)));
    }
  };
  draw_weights(router_->weight, WeightKind::kSingle, seed_of(seed_, kRouter));
  if (shared_) {
    draw(*shared_, WeightKind::kSingle, [&](uint64_t place) { return seed_of(seed_, kShared + 100 * (place + 1)); });
  }
  const auto of_experts = [&](uint64_t place) { return seed_of(seed_, kExperts + 100 * (place + 1)); };
  const auto* list = experts_->as<torch::nn::ModuleListImpl>();
  if (!list) return draw(*experts_, WeightKind::kStacked, of_experts);
  const auto own = own_of(*list, mesh_);
  const auto first = mesh_.defined() ? mesh_.local_rank() * static_cast<int64_t>(own.size()) : 0;
  for (size_t i = 0; i < own.size(); ++i) {
    draw(*own[i], WeightKind::kSingle,
         [&](uint64_t place) { return seed_of(of_experts(place), static_cast<uint64_t>(first) + i); });
  }
}

at::Tensor MoEImpl::forward(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == options_.width, "MoE (rank ", process_context().rank(), "): x has the shape ",
                    x.sizes(), ", but a width of ", options_.width, " is expected");
  check_trains_together();
  const TokenRows tokens(x, *router_, ranks_.tensor_parallel);
  auto routing = route(tokens.logits(), options_.route, router_->bias);
  note(routing);
  const auto all = routing;
  if (options_.capacity) {
    check_knows_ranks("a capacity");
    routing = limit_to_capacity(std::move(routing), *options_.capacity, token_ranks());
    statistics_.dropped = routing.experts.lt(0).sum().item<int64_t>();
  }
  const auto sent = dispatch(tokens.rows(), routing, mesh_);
  at::Tensor beside;
  const auto meanwhile = [&] {
    if (shared_) beside = shared_->forward(x);
    return at::Tensor();
  };
  const auto rows = combine(run_experts(sent.tokens, sent.counts), sent, routing, meanwhile);
  const auto y = tokens.shaped(injected(rows, tokens, all));
  return beside.defined() ? y + beside : y;
}

at::Tensor MoEImpl::run_experts(const at::Tensor& tokens, const std::vector<int64_t>& counts) {
  if (auto* stacked = experts_->as<StackedExpertsImpl>()) return stacked->forward(tokens, counts);
  const auto own = own_of(*experts_->as<torch::nn::ModuleListImpl>(), mesh_);
  const auto parts = tokens.split_with_sizes(counts, 0);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < own.size(); ++i) outputs.push_back(own[i]->as<FeedForward>()->forward(parts[i])); // also of no tokens
  return at::cat(outputs);
}

/// The ranks whose tokens count together.
DeviceMesh MoEImpl::token_ranks() const { return ranks_.tokens.defined() ? ranks_.tokens : mesh_; }

/// Otherwise each of the ranks that train the layer together would count its own tokens, and route by a bias of its own.
void MoEImpl::check_knows_ranks(const char* what) const {
  if (token_ranks().defined() || !is_dtensor(router_->weight)) return;
  const auto mesh = DTensor(router_->weight).mesh();
  TORCH_CHECK(mesh.size() == 1, "MoE (rank ", process_context().rank(), "): ", what,
              " is of the tokens of all ranks, but the layer, which lies on ", mesh.to_string(),
              ", does not know these: call expert_parallel(model, expert_mesh(mesh, 1)[\"ep\"], {.tokens = mesh}), which splits "
              "nothing, and fully_shard of each layer's experts() before that of what holds them");
}

/// Ranks that have all experts, and shard them by fewer than train the layer, would train others.
void MoEImpl::check_trains_together() const {
  const auto parameters = mesh_.defined() || !is_dtensor(router_->weight) ? std::vector<at::Tensor>() : experts_->parameters();
  if (parameters.empty() || !is_dtensor(parameters[0])) return;
  const auto all = DTensor(router_->weight).mesh(), of_experts = DTensor(parameters[0]).mesh();
  TORCH_CHECK(of_experts.size() >= all.size(), "MoE (rank ", process_context().rank(), "): the experts lie on ",
              of_experts.to_string(), ", and the rest of the layer on ", all.to_string(),
              ", so that its ranks would train different experts: call expert_parallel before fully_shard of the experts, or "
              "shard them over all of these ranks");
}

at::Tensor MoEImpl::injected(const at::Tensor& output, const TokenRows& tokens, const Routing& routing) {
  const auto& [balance, scope, z] = options_.losses;
  statistics_.balance_loss = at::Tensor();
  statistics_.z_loss = at::Tensor();
  if ((balance == 0 && z == 0) || !at::GradMode::is_enabled()) return output;
  const auto& tensor_parallel = ranks_.tensor_parallel;
  const auto losses = token_ranks().defined() ? token_ranks().size() : 1;
  const bool is_of_all = scope == BalanceScope::kAllRanks;
  if (is_of_all) check_knows_ranks("a balancing loss");
  const double of_one_loss = tensor_parallel.defined() ? static_cast<double>(tensor_parallel.size()) : 1;
  const auto all = is_of_all ? count_tokens(routing, token_ranks(), static_cast<double>(losses) / of_one_loss)
                             : count_tokens(routing, tensor_parallel, 1);
  at::Tensor loss;
  if (balance > 0) {
    loss = balance * (scope == BalanceScope::kSequence ? sequence_balancing_loss(routing, tokens.sequences())
                                                       : load_balancing_loss(routing, all));
    statistics_.balance_loss = loss.detach() * of_one_loss;
  }
  if (z > 0) {
    const auto of_logits = z * router_z_loss(tokens.logits(), all);
    statistics_.z_loss = of_logits.detach() * of_one_loss;
    loss = loss.defined() ? loss + of_logits : of_logits;
  }
  return inject_loss(output, loss, loss_scale_);
}

void MoEImpl::note(const Routing& routing) {
  const at::NoGradGuard no_grad;
  statistics_.counts = routing.counts;
  statistics_.dropped = 0;
  if (!router_->bias.defined() || !is_training() || internal::in_second_run()) return;
  chosen_ = chosen_.defined() ? chosen_ + routing.counts : routing.counts;
}

std::vector<MoEImpl*> moe_layers(torch::nn::Module& module) {
  std::vector<MoEImpl*> layers;
  const auto add = [&](torch::nn::Module& each) {
    auto* const layer = each.as<MoEImpl>(); // one that two modules hold comes twice
    if (layer && std::find(layers.begin(), layers.end(), layer) == layers.end()) layers.push_back(layer);
  };
  add(module); // which may be on the stack
  for (const auto& each : module.modules(/*include_self=*/false)) add(*each);
  return layers;
}

void set_router_loss_scale(torch::nn::Module& module, double scale) {
  for (auto* layer : moe_layers(module)) layer->set_loss_scale(scale);
}

} // namespace tessera
