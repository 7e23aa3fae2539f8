#pragma once

#include <torch/nn/module.h>

#include <cstdint>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// Who has tokens for the experts.
struct ExpertParallelOptions {
  /// All ranks with tokens, of those that have the same layers: the data-parallel ones, those of cp and of tp. Those that have
  /// the same experts are among them. Undefined: the ranks of the experts' mesh, which is an error where its root has others.
  DeviceMesh tokens = {};
  /// The ranks of tensor parallelism, which have the same tokens and one loss: each takes its part of them to the experts.
  /// Undefined: every rank has tokens and a loss of its own.
  DeviceMesh tensor_parallel = {};
};

/// Expert parallelism: splits experts over the n ranks of the 1-D `mesh`, in place. Of E experts rank r has those from r·E/n on.
/// `module` is
///
/// - one with `MoE`s in it (parallel/moe.h), or a `MoE`: all of their experts;
/// - a torch::nn::ModuleList of experts: those of other ranks are taken off the list's children, have no memory any more, and a
///   read of them is an error that names their rank. The others keep their names;
/// - any other module, all of whose parameters are stacked, [E, …]: each becomes a DTensor, Shard(0).
///
/// Each rank keeps its own values of its experts; nothing is sent but a comparison of what the ranks have. Gradients then arrive
/// as sums over all ranks of the mesh. `fully_shard` of the experts, over the ranks that have the same ones, adds the others' and
/// divides by the number of ranks with a loss of their own; it is called before that of what holds the experts, also where one
/// rank has them alone:
///
///   const auto experts = expert_mesh(mesh[{"shard", "cp", "tp"}], 4); // efsdp × ep
///   expert_parallel(*model, experts["ep"], {.tokens = mesh});
///   for (auto* moe : moe_layers(*model)) fully_shard(*moe->experts(), experts["efsdp"]);
///   fully_shard(*model, mesh["shard"]);
///
/// Every rank of the mesh calls it, before `parallelize`, `fully_shard` and an optimizer. Errors, on all of them, before anything
/// changes: n that does not divide the experts, ranks with other experts, parameters that are sharded already or not stacked.
void expert_parallel(torch::nn::Module& module, const DeviceMesh& mesh, const ExpertParallelOptions& options = {});

/// The ranks of `mesh`, in the order of its dims, as efsdp × ep: `expert_ranks` neighbours have different experts, and the ranks
/// at one place among their neighbours have the same. Nothing is communicated. An error unless `expert_ranks` divides the ranks.
DeviceMesh expert_mesh(const DeviceMesh& mesh, int64_t expert_ranks);

} // namespace tessera
