#include <tessera/fsdp/layout/stages.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

namespace tessera::internal {

namespace {

/// Connects the ranks of stages, for collectives that the schedule runs on streams of its own.
class Connector {
 public:
  explicit Connector(CommunicatorUse use) : use_(use) {}

  /// Null for one rank.
  CommunicatorPtr connect(const DeviceMesh& mesh, int64_t dim, const char* purpose) const {
    if (mesh.size(dim) == 1) return nullptr;
    auto communicator = mesh.communicator(dim, use_ == CommunicatorUse::kShared ? "fsdp" : purpose);
    communicator->run_on_current_stream();
    return communicator;
  }

 private:
  CommunicatorUse use_;
};

/// Splits the shard axis into neighbours. How many ranks these are is none where a forward leaves all or this rank's shard.
std::optional<Stage> stage_after_forward(const MeshRoles& roles, const std::optional<ReshardAfterForward>& after_forward,
                                         const Connector& connector) {
  if (!after_forward || !after_forward->ranks()) return std::nullopt;
  const int64_t ranks = *after_forward->ranks();
  if (ranks == 1 || ranks == roles.shard_ranks()) return std::nullopt;
  const auto& mesh = roles.mesh();
  const auto dim = *roles.shard_dim();
  auto shape = mesh.shape();
  shape[static_cast<size_t>(dim)] /= ranks;
  shape.insert(shape.begin() + dim + 1, ranks);
  const auto split = make_device_mesh(mesh.device_type(), shape, mesh.rank_list());
  return Stage{Stage::Kind::kAllGather, connector.connect(split, dim + 1, "fsdp.neighbours"), Stage::Kept::kAfterForward};
}

} // namespace

bool Stages::communicates() const {
  return std::any_of(gathers.begin(), gathers.end(), [](const Stage& each) { return each.communicator != nullptr; });
}

const CommunicatorPtr& Stages::reduce_scatter() const {
  static const CommunicatorPtr none;
  return !reductions.empty() && reductions[0].kept == Stage::Kept::kNothing ? reductions[0].communicator : none;
}

int Stages::reducing_ranks() const {
  int ranks = 1;
  for (const auto& each : reductions) ranks *= each.ranks();
  return ranks;
}

bool Stages::averages(at::ScalarType dtype) const { // one may be the program's own
  return std::all_of(reductions.begin(), reductions.end(), [&](const Stage& each) { return each.communicator->averages(dtype); });
}

std::string text_of_reshard_after_forward(const std::optional<ReshardAfterForward>& option) {
  if (!option) return "unset";
  return option->ranks() ? std::to_string(*option->ranks()) : *option ? "true" : "false";
}

void check_after_forward(const MeshRoles& roles, const std::optional<ReshardAfterForward>& after_forward) {
  if (!after_forward) return;
  const auto& name = row_of(roles.strategy()).name;
  TORCH_CHECK_VALUE(!*after_forward || !roles.keeps_parameters(), "fully_shard: the strategy ", name,
                    " keeps the parameters gathered, but reshard_after_forward is ",
                    text_of_reshard_after_forward(after_forward));
  if (!after_forward->ranks() || *after_forward->ranks() == 1 || *after_forward->ranks() == roles.shard_ranks()) return;
  const int64_t ranks = *after_forward->ranks();
  TORCH_CHECK_VALUE(roles.shards(), "fully_shard: reshard_after_forward is ", ranks, " ranks, but the strategy ", name,
                    " shards nothing");
  TORCH_CHECK_VALUE(ranks >= 1 && roles.shard_ranks() % ranks == 0, "fully_shard: reshard_after_forward of ", ranks,
                    " ranks, but these must divide the ", roles.shard_ranks(), " ranks of the shard dim");
  const auto splits = [](const DimRole& each) { return each.shards() && each.ranks.size() > 1; };
  TORCH_CHECK_VALUE(std::none_of(roles.roles().begin(), roles.roles().end() - 1, splits),
                    "fully_shard: reshard_after_forward is a number, but the strategy ", name,
                    " says already between which ranks a forward leaves the parameters");
}

Stages connect_stages(const MeshRoles& roles, const std::optional<ReshardAfterForward>& after_forward, CommunicatorUse use) {
  check_after_forward(roles, after_forward);
  const Connector connector(use);
  Stages stages;
  const auto& all = roles.roles();
  for (const auto& role : all) {
    const bool is_innermost = &role == &all.back();
    if (!is_innermost && (!role.shards() || role.ranks.size() == 1)) continue;
    auto communicator = role.shards() ? connector.connect(role.ranks, 0, "fsdp.all_gather") : nullptr;
    const bool stays = role.shards() && !role.states.parameters;
    stages.gathers.push_back(
        {Stage::Kind::kAllGather, std::move(communicator), stays ? Stage::Kept::kUntilWritten : Stage::Kept::kNothing});
  }
  for (auto role = all.rbegin(); role != all.rend(); ++role) {
    if (role->ranks.size() == 1) continue;
    const auto purpose = role->shards() ? "fsdp.reduce_scatter" : "fsdp.all_reduce";
    const bool is_first_scatter = role->shards() && role == all.rbegin();
    stages.reductions.push_back({role->shards() ? Stage::Kind::kReduceScatter : Stage::Kind::kAllReduce,
                                 connector.connect(role->ranks, 0, purpose),
                                 is_first_scatter ? Stage::Kept::kNothing : Stage::Kept::kUntilAllReduce});
  }
  if (auto last = stage_after_forward(roles, after_forward, connector)) stages.gathers.push_back(std::move(*last));
  return stages;
}

} // namespace tessera::internal
