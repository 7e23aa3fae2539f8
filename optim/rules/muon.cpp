#include <tessera/optim/muon.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <unordered_set>
#include <utility>

#include <tessera/optim/parts/check_options.h>
#include <tessera/optim/parts/fused_lists.h>
#include <tessera/optim/parts/on_whole.h>
#include <tessera/optim/parts/stepped.h>
#include <tessera/optim/register_optimizer.h>

namespace tessera {

namespace {

using torch::optim::OptimizerParamGroup;

const MuonOptions& checked(const MuonOptions& options) {
  internal::check_not_negative("Muon", "lr", options.lr());
  internal::check_not_negative("Muon", "weight_decay", options.weight_decay());
  internal::check_not_negative("Muon", "eps", options.eps());
  internal::check_not_negative("Muon", "adamw_eps", options.adamw_eps());
  internal::check_betas("Muon", "adamw_betas", options.adamw_betas());
  TORCH_CHECK(options.momentum() >= 0 && options.momentum() < 1, "Muon: momentum is ", options.momentum(),
              "; it must be in [0, 1)");
  TORCH_CHECK(options.ns_steps() >= 0 && options.ns_steps() < 100, "Muon: ns_steps is ", options.ns_steps(),
              "; it must be from 0 to 99");
  return options;
}

void register_muon() {
  [[maybe_unused]] static const bool done = [] {
    using State = MuonParamState;
    using Options = MuonOptions;
    register_optimizer<Muon, State, Options>("Muon",
                                             {{"momentum_buffer", &State::momentum_buffer},
                                              {"step", &State::step},
                                              {"exp_avg", &State::exp_avg},
                                              {"exp_avg_sq", &State::exp_avg_sq}},
                                             {{"lr", &Options::lr},
                                              {"weight_decay", &Options::weight_decay},
                                              {"momentum", &Options::momentum},
                                              {"nesterov", &Options::nesterov},
                                              {"ns_coefficients", &Options::ns_coefficients},
                                              {"ns_steps", &Options::ns_steps},
                                              {"eps", &Options::eps},
                                              {"adjust_lr", &Options::adjust_lr},
                                              {"use_muon", &Options::use_muon},
                                              {"adamw_betas", &Options::adamw_betas},
                                              {"adamw_eps", &Options::adamw_eps}});
    return true;
  }();
}

int64_t rows_of(const at::Tensor& parameter) { return parameter.size(0); }
int64_t columns_of(const at::Tensor& parameter) { return parameter.numel() / std::max<int64_t>(rows_of(parameter), 1); }

/// The Newton-Schulz iteration towards the orthogonal matrix that is nearest to a bf16 matrix: X = aX + (bA + cA²)X with A = XXᵀ,
/// on the wide one of X and its transpose.
at::Tensor orthogonalized(const at::Tensor& tensor, const MuonOptions& options) {
  const auto [a, b, c] = options.ns_coefficients();
  auto matrix = tensor.reshape({rows_of(tensor), columns_of(tensor)});
  const bool is_tall = matrix.size(0) > matrix.size(1);
  if (is_tall) matrix = matrix.t();
  matrix = matrix / matrix.norm().clamp(options.eps());
  for (int64_t i = 0; i < options.ns_steps(); ++i) {
    const auto gram = matrix.mm(matrix.t());
    matrix = at::addmm(matrix, at::addmm(gram, gram, gram, b, c), matrix, a);
  }
  return (is_tall ? matrix.t() : matrix).reshape(tensor.sizes());
}

double adjusted_lr(const at::Tensor& parameter, const MuonOptions& options) {
  const auto rows = static_cast<double>(rows_of(parameter)), columns = static_cast<double>(columns_of(parameter));
  if (options.adjust_lr() == MuonAdjustLr::kMatchRmsAdamW) return options.lr() * 0.2 * std::sqrt(std::max(rows, columns));
  return options.lr() * std::sqrt(std::max(1.0, columns > 0 ? rows / columns : 1.0));
}

void check_group(const OptimizerParamGroup& group) {
  const auto& options = checked(static_cast<const MuonOptions&>(group.options()));
  if (!options.use_muon()) return;
  for (const auto& parameter : group.params()) {
    TORCH_CHECK(parameter.dim() >= 2, "Muon: a parameter of shape ", parameter.sizes(),
                " is no matrix; give vectors and scalars to a group with use_muon(false), which AdamW steps (muon_groups does)");
  }
}

using MuonEntry = internal::Stepped<MuonParamState, MuonOptions>;

/// The direction of a matrix before it is made orthogonal, in the dtype that it is sent in.
at::Tensor direction(const MuonEntry& entry) {
  auto& momentum = entry.state->momentum_buffer();
  if (!momentum.defined()) momentum = at::zeros_like(entry.parameter);
  momentum.lerp_(entry.gradient, 1 - entry.options->momentum());
  return (entry.options->nesterov() ? entry.gradient.lerp(momentum, entry.options->momentum()) : momentum).to(at::kBFloat16);
}

/// The matrices of one group of options, since the iteration is a function of these.
void step_matrices(std::vector<MuonEntry> entries) {
  while (!entries.empty()) {
    const auto& options = *entries[0].options;
    const auto same = [&](const MuonEntry& entry) { return entry.options == &options; };
    const auto end = std::stable_partition(entries.begin(), entries.end(), same);
    std::vector<at::Tensor> directions;
    for (auto entry = entries.begin(); entry != end; ++entry) directions.push_back(direction(*entry));
    const auto compute = [&](const at::Tensor& matrix) { return orthogonalized(matrix, options); };
    const auto updates = internal::on_whole(directions, compute, "the matrices of Muon");
    for (size_t i = 0; i < updates.size(); ++i) {
      auto& parameter = entries[i].parameter;
      if (options.weight_decay() != 0) parameter.mul_(1 - options.lr() * options.weight_decay());
      parameter.add_(updates[i], -adjusted_lr(parameter, options));
    }
    entries.erase(entries.begin(), end);
  }
}

void step_others(const std::vector<MuonEntry>& entries) {
  for (const auto& [parameter, gradient, state, options] : entries) {
    if (!state->exp_avg().defined()) {
      state->exp_avg(at::zeros_like(parameter));
      state->exp_avg_sq(at::zeros_like(parameter));
    }
    state->step(state->step() + 1);
  }
  for (auto entry = entries.begin(); entry != entries.end();) {
    const auto& options = *entry->options;
    std::vector<internal::FusedEntry> list;
    for (; entry != entries.end() && entry->options == &options; ++entry) {
      auto& state = *entry->state;
      list.push_back({{entry->parameter, entry->gradient, state.exp_avg(), state.exp_avg_sq()}, state.step()});
    }
    const auto [beta1, beta2] = options.adamw_betas();
    internal::fused_adam_step(list, {.lr = options.lr(),
                                     .beta1 = beta1,
                                     .beta2 = beta2,
                                     .eps = options.adamw_eps(),
                                     .weight_decay = options.weight_decay(),
                                     .amsgrad = false,
                                     .decoupled = true});
  }
}

std::unordered_set<const void*> embeddings_of(const torch::nn::Module& module) {
  std::unordered_set<const void*> embeddings;
  for (const auto& each : module.modules()) {
    if (!each->as<torch::nn::Embedding>() && !each->as<torch::nn::EmbeddingBag>()) continue;
    for (const auto& parameter : each->parameters(false)) embeddings.insert(parameter.unsafeGetTensorImpl());
  }
  return embeddings;
}

} // namespace

Muon::Muon(const std::vector<OptimizerParamGroup>& groups, const MuonOptions& defaults)
    : ShardedOptimizer(groups, std::make_unique<MuonOptions>(checked(defaults))) {
  for (const auto& group : param_groups()) check_group(group);
  register_muon();
}

Muon::Muon(std::vector<at::Tensor> parameters, const MuonOptions& defaults)
    : Muon({OptimizerParamGroup(std::move(parameters))}, defaults) {}

void Muon::update() {
  auto entries = internal::stepped_parameters<MuonParamState, MuonOptions>(*this);
  const auto middle =
      std::stable_partition(entries.begin(), entries.end(), [](const auto& entry) { return entry.options->use_muon(); });
  step_matrices({entries.begin(), middle});
  step_others({middle, entries.end()});
}

std::vector<OptimizerParamGroup> muon_groups(const torch::nn::Module& module, const MuonOptions& muon, const MuonOptions& adamw,
                                             const std::vector<std::string>& others) {
  const auto embeddings = embeddings_of(module);
  std::unordered_set<const void*> listed;
  std::unordered_set<std::string> found;
  std::vector<at::Tensor> matrices, rest;
  for (const auto& item : module.named_parameters()) {
    bool is_other = item.value().dim() < 2 || embeddings.contains(item.value().unsafeGetTensorImpl());
    for (const auto& name : others) {
      if (item.key().find(name) == std::string::npos) continue;
      is_other = true;
      found.insert(name);
    }
    if (listed.insert(item.value().unsafeGetTensorImpl()).second) (is_other ? rest : matrices).push_back(item.value());
  }
  for (const auto& name : others) TORCH_CHECK(found.contains(name), "muon_groups: no parameter's name contains \"", name, '"');
  std::vector<OptimizerParamGroup> groups;
  const auto add = [&](std::vector<at::Tensor> parameters, MuonOptions options) {
    if (!parameters.empty()) groups.emplace_back(std::move(parameters), std::make_unique<MuonOptions>(std::move(options)));
  };
  add(std::move(matrices), MuonOptions(muon).use_muon(true));
  add(std::move(rest), MuonOptions(adamw).use_muon(false));
  return groups;
}

} // namespace tessera
