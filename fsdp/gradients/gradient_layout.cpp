#include <tessera/fsdp/gradients/gradient_layout.h>

#include <c10/util/accumulate.h>

namespace tessera::internal {

namespace {

/// Rank `rank`'s piece: rows of the parameter, or a part of another dim, or elements.
std::vector<int64_t> sizes_of_piece(const ShardedParameter& parameter, const ParameterLayout& layout, size_t rank) {
  const auto piece = layout.pieces[rank];
  auto sizes = parameter.unsharded_sizes();
  if (sizes.empty() || !parameter.strides.shard().empty()) return {piece.numel};
  const auto dim = static_cast<size_t>(layout.split_dim);
  const int64_t whole = c10::multiply_integers(sizes), others = whole == 0 ? 1 : whole / sizes[dim];
  const bool is_whole_rows = piece.numel % others == 0 && (layout.split_dim > 0 || piece.begin % others == 0);
  if (!is_whole_rows) return {piece.numel};
  sizes[dim] = piece.numel / others;
  return sizes;
}

} // namespace

std::shared_ptr<const GradientLayout> gradient_layout_of(const ParameterGroup& group, const std::vector<bool>& takes_part,
                                                         const ReduceLayout& layout, at::ScalarType dtype) {
  auto result = std::make_shared<GradientLayout>();
  result->flags = layout.used_offset;
  result->chunk_numel = layout.chunk_numel;
  result->dtype = dtype;
  result->chunks.resize(static_cast<size_t>(group.roles().shard_ranks()));
  for (size_t i = 0; i < group.parameters().size(); ++i) {
    const auto& parameter = group.parameters()[i];
    const auto& pieces = group.layout().parameters[i];
    result->names.push_back(group.full_name(i));
    result->sizes.push_back(parameter.unsharded_sizes());
    for (size_t rank = 0; takes_part[i] && rank < result->chunks.size(); ++rank) {
      if (pieces.pieces[rank].numel > 0)
        result->chunks[rank].push_back({i, layout.offsets[i][rank], sizes_of_piece(parameter, pieces, rank)});
    }
  }
  return result;
}

std::vector<ReductionStage> reduction_stages_of(const MeshRoles& roles, const Stages& of_group) {
  std::vector<ReductionStage> stages;
  int64_t first = 0, chunks = roles.shard_ranks();
  for (const auto& stage : of_group.reductions) {
    const bool scatters = stage.kind == Stage::Kind::kReduceScatter;
    stages.push_back({.kind = scatters ? ReductionStage::Kind::kReduceScatter : ReductionStage::Kind::kAllReduce,
                      .number = stages.size(),
                      .first_chunk = first,
                      .chunks = chunks,
                      .communicator = stage.communicator.get()});
    if (!scatters) continue;
    chunks /= stage.ranks();
    first += stage.rank() * chunks;
  }
  return stages;
}

std::shared_ptr<ReductionExtension> make_reduction_extension(const ParameterGroup& group, const std::vector<bool>& takes_part,
                                                             const ReduceLayout& layout, at::ScalarType dtype) {
  const auto& policy = group.options().communication.reduction;
  if (!policy || group.stages().reductions.empty()) return nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(!at::isComplexType(dtype), "the gradients of ", group.label(), " (", group.full_name(0),
                              ", ...) are complex numbers, which a reduction by policy (", policy->description(),
                              ") cannot take");
  const ProgramCall program(group.mutex(), "a ReductionPolicy");
  return policy->make(gradient_layout_of(group, takes_part, layout, dtype), reduction_stages_of(group.roles(), group.stages()));
}

} // namespace tessera::internal
