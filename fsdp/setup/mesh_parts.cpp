#include <tessera/fsdp/setup/mesh_parts.h>

#include <c10/util/Exception.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>

#include <tessera/base/error_text.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/fsdp/group/expert_mark.h>
#include <tessera/fsdp/setup/initial_weights.h>

namespace tessera::internal {

namespace {

MeshPart& part_for(const FreeParameter& parameter, bool can_split, std::vector<MeshPart>& parts) {
  const bool is_whole = can_split && parameter.placement && is_replicate(*parameter.placement);
  const auto same = [&](const MeshPart& each) { return each.is_whole == is_whole && each.mesh == parameter.mesh; };
  const auto found = std::find_if(parts.begin(), parts.end(), same);
  if (found != parts.end()) return *found;
  parts.push_back({.mesh = parameter.mesh, .is_whole = is_whole});
  return parts.back();
}

std::vector<at::Tensor> tensors_of(const MeshPart& part) {
  std::vector<at::Tensor> tensors;
  for (const auto& each : part.parameters) tensors.push_back(each.tensor);
  return tensors;
}

MeshRoles roles_of(const MeshPart& part, const CallMesh& call, const FullyShardOptions& options) {
  if (!part.is_beside()) return {call.given, call.strategy, options.data_parallel_dims};
  const auto& mesh = part.mesh.defined() ? part.mesh : call.data_parallel;
  if (part.is_whole && mesh.dim_names().empty()) return {mesh.flatten(), Strategy::kNoShard};
  if (part.is_whole) return {mesh, Strategy::kNoShard, DataParallelDims{.outer = {}, .inner = mesh.dim_names()}};
  return {mesh, options.strategy ? *options.strategy : default_strategy(mesh, std::nullopt)};
}

void agree_on_values(const MeshPart& part, const FullyShardOptions& options, const std::string& name) {
  std::vector<at::Tensor> values;
  for (const auto& each : part.parameters) values.push_back(each.values());
  agree_on_initial_weights(
      {.tensors = values,
       .names = part.names,
       .buffers = {},
       .mesh = part.mesh,
       .mode = options.initial_weights,
       .call = "fully_shard of " + name,
       .options = std::string("parameters of shard_placement_fn's mesh, ") + (part.is_whole ? "whole" : "split")});
}

} // namespace

std::vector<MeshPart> split_by_mesh(const std::vector<FreeParameter>& parameters, const std::vector<std::string>& names,
                                    const CallMesh& call) {
  const bool can_split = row_of(call.strategy).inner.optimizer_state;
  std::vector<MeshPart> parts;
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& part = part_for(parameters[i], can_split, parts);
    part.parameters.push_back(parameters[i]);
    part.names.push_back(names[i]);
  }
  std::stable_sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.is_beside() < b.is_beside(); });
  for (auto& part : parts)
    part.divisor = expert_divisor(tensors_of(part), part.names, part.mesh.defined() ? part.mesh : call.data_parallel);
  return parts;
}

void agree_on_parts(std::vector<MeshPart>& parts, const CallMesh& call, const FullyShardOptions& options,
                    const std::string& name) {
  std::string failure;
  bool has_meshes = false;
  for (auto& part : parts) {
    has_meshes = has_meshes || part.mesh.defined();
    try {
      part.roles = roles_of(part, call, options);
      if (part.mesh.defined()) agree_on_values(part, options, name);
    } catch (const std::exception& error) {
      if (!part.mesh.defined()) throw; // as on all ranks of the call
      if (failure.empty()) failure = error_text(error);
    }
  }
  if (!has_meshes) return;
  const auto& all = call.data_parallel;
  throw_failures(failure, *(all.ndim() == 1 ? all : all.flatten()).communicator(), all.device(), "fully_shard's meshes");
}

void connect_parts(std::vector<MeshPart>& parts, const FullyShardOptions& options) {
  for (auto& part : parts) {
    const auto after_forward = part.is_whole ? std::nullopt : options.reshard_after_forward;
    part.stages = connect_stages(*part.roles, after_forward, options.communicators);
  }
}

} // namespace tessera::internal
