#include <tessera/parallel/expert_parallel.h>

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/container/modulelist.h>

#include <memory>
#include <string>
#include <vector>

#include <tessera/base/error_text.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/fsdp/group/expert_mark.h>
#include <tessera/parallel/experts/split_experts.h>
#include <tessera/parallel/moe.h>

namespace tessera {

namespace {

using internal::experts::SplitExperts;

/// The experts that a call splits: those of its MoE layers, or the module's own.
std::vector<SplitExperts> experts_in(torch::nn::Module& module, const DeviceMesh& mesh) {
  std::vector<SplitExperts> all;
  absl::flat_hash_set<const MoEImpl*> seen; // one that two modules hold comes twice
  absl::flat_hash_map<const c10::TensorImpl*, std::string> owners;
  const auto add = [&](torch::nn::Module& each, const std::string& path) {
    auto* const layer = each.as<MoEImpl>();
    if (!layer || !seen.insert(layer).second) return;
    const auto name = path.empty() ? "experts" : path + ".experts";
    for (const auto& weight : layer->experts()->named_parameters()) {
      const auto [owner, is_new] = owners.try_emplace(weight.value().unsafeGetTensorImpl(), name);
      TORCH_CHECK_VALUE(is_new, "expert_parallel: ", name, '.', weight.key(), " is a weight of ", owner->second,
                        " too; experts that share weights cannot be split");
    }
    all.emplace_back(*layer->experts(), name, mesh);
  };
  add(module, ""); // which may be on the stack
  for (const auto& item : module.named_modules("", /*include_self=*/false)) add(*item.value(), item.key());
  if (all.empty()) all.emplace_back(module, "", mesh);
  return all;
}

int64_t count_of(const DeviceMesh& mesh) { return mesh.defined() ? mesh.size() : 1; }

void check_ranks(const DeviceMesh& mesh, const ExpertParallelOptions& options) {
  TORCH_CHECK_VALUE(mesh.defined() && mesh.ndim() == 1,
                    "expert_parallel: the mesh must have one dim, as mesh[\"ep\"] has, but it is ",
                    mesh.defined() ? mesh.to_string() : "undefined");
  TORCH_CHECK_VALUE(mesh.coordinate(), "expert_parallel: rank ", process_context().rank(), " is not in ", mesh.to_string());
  const auto& tokens = options.tokens;
  TORCH_CHECK_VALUE(tokens.defined() || mesh.root().size() == mesh.size(), "expert_parallel: ", mesh.to_string(),
                    " is a part of ", mesh.root().to_string(),
                    ": say with ExpertParallelOptions::tokens which of these ranks have tokens for the experts");
  const auto check_within = [&](const DeviceMesh& inner, const char* what) {
    for (const auto rank : inner.ranks()) {
      TORCH_CHECK_VALUE(!tokens.defined() || tokens.rank_list().index_of(rank), "expert_parallel: rank ", rank, " of ", what, " ",
                        inner.to_string(), " is not among those with tokens, ", tokens.to_string());
    }
  };
  check_within(mesh, "the experts' mesh");
  if (options.tensor_parallel.defined()) check_within(options.tensor_parallel, "tensor parallelism");
  TORCH_CHECK_VALUE(!tokens.defined() || tokens.size() % (mesh.size()) == 0, "expert_parallel: ", tokens.size(), " ranks of ",
                    tokens.to_string(), " are no multiple of the ", mesh.size(), " of ", mesh.to_string());
}

/// What all ranks must have alike; an error on all of them where one has a problem, or they differ.
void agree(const std::vector<SplitExperts>& all, const std::string& problem, const ExpertParallelOptions& options,
           const DeviceMesh& mesh) {
  const auto communicator = mesh.communicator();
  internal::throw_failures(problem, *communicator, mesh.device(), "expert_parallel");
  std::string text =
      c10::str("tokens on ", count_of(options.tokens), " ranks, tensor parallelism of ", count_of(options.tensor_parallel), "\n");
  for (const auto& each : all) text += each.describe();
  const auto texts = internal::gather_texts_that_differ(text, *communicator, mesh.device(), "expert_parallel");
  TORCH_CHECK_VALUE(texts.empty(), "expert_parallel: the ranks of ", mesh.to_string(),
                    " differ: ", internal::first_difference(texts, mesh.ranks(), "experts"));
}

internal::ExpertMark mark_of(const DeviceMesh& mesh, const ExpertParallelOptions& options) {
  internal::ExpertMark mark{.experts = mesh, .ranks_of_loss = count_of(options.tensor_parallel)};
  if (options.tokens.defined()) mark.token_ranks = options.tokens.size();
  return mark;
}

} // namespace

void expert_parallel(torch::nn::Module& module, const DeviceMesh& mesh, const ExpertParallelOptions& options) {
  check_ranks(mesh, options);
  std::vector<SplitExperts> all;
  std::string problem;
  try {
    all = experts_in(module, mesh);
    for (const auto& each : all) each.check();
  } catch (const std::exception& error) {
    problem = internal::error_text(error);
  }
  agree(all, problem, options, mesh);
  for (auto& each : all) each.split(mark_of(mesh, options));
  for (auto* layer : moe_layers(module)) {
    layer->mesh_ = mesh;
    layer->ranks_ = options;
  }
}

DeviceMesh expert_mesh(const DeviceMesh& mesh, int64_t expert_ranks) {
  TORCH_CHECK_VALUE(mesh.defined(), "expert_mesh: the mesh is undefined");
  TORCH_CHECK_VALUE(expert_ranks >= 1 && mesh.size() % expert_ranks == 0, "expert_mesh: ", expert_ranks,
                    " ranks of experts do not divide the ", mesh.size(), " of ", mesh.to_string());
  const auto flat = mesh.ndim() == 1 ? mesh : mesh.flatten("experts");
  return flat.unflatten(0, {mesh.size() / expert_ranks, expert_ranks}, {"efsdp", "ep"});
}

} // namespace tessera
