#include <tessera/fsdp/group/expert_mark.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace tessera::internal {

namespace {

/// The mark, as a tensor hook that leaves gradients as they are: it goes where autograd's part of the parameter goes.
struct CarriesMark {
  at::TensorBase operator()(const at::TensorBase& /*gradient*/) const { return {}; }
  ExpertMark mark;
};

/// All that have experts, where `mesh` has those with the same.
int64_t ranks_of(const ExpertMark& mark, const DeviceMesh& mesh) { return mesh.size() * mark.experts.size(); }

std::string where(const ExpertMark& mark) { return "of experts that are split over " + mark.experts.to_string(); }

} // namespace

void mark_expert(const at::Tensor& parameter, const ExpertMark& mark) {
  auto* autograd = torch::autograd::impl::materialize_autograd_meta(parameter);
  if (!autograd->cpp_hooks_list_) torch::autograd::impl::create_cpp_hook(parameter);
  autograd->cpp_hooks_list_->emplace_back(CarriesMark{mark});
}

const ExpertMark* expert_mark(const at::Tensor& parameter) {
  auto* const autograd = torch::autograd::impl::get_autograd_meta(parameter);
  if (!autograd || !autograd->cpp_hooks_list_) return nullptr;
  for (auto& hook : *autograd->cpp_hooks_list_) {
    if (const auto* carries = hook.target<CarriesMark>()) return &carries->mark;
  }
  return nullptr;
}

void check_expert(const at::Tensor& parameter, const std::string& name, const DeviceMesh& mesh) {
  const auto* const mark = expert_mark(parameter);
  if (!mark) return;
  const auto& experts = mark->experts.ranks();
  const auto shared =
      std::count_if(experts.begin(), experts.end(), [&](int64_t rank) { return mesh.rank_list().index_of(rank).has_value(); });
  TORCH_CHECK_VALUE(
      shared <= 1, "fully_shard: the parameter ", name, " is one ", where(*mark),
      ", which have others, but it would be sharded over ", mesh.to_string(),
      " with them. Call fully_shard of the experts before that of what holds them, over the ranks that have the same "
      "experts");
  const auto ranks = ranks_of(*mark, mesh);
  TORCH_CHECK_VALUE(!mark->token_ranks || *mark->token_ranks == ranks, "fully_shard: the parameter ", name, " is one ",
                    where(*mark), ", and would be sharded over the ", mesh.size(), " ranks of ", mesh.to_string(), ": these are ",
                    ranks, " ranks in all, but ", *mark->token_ranks, " have tokens for the experts");
}

std::optional<double> expert_divisor(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                                     const DeviceMesh& mesh) {
  const ExpertMark* mark = nullptr;
  size_t marked = 0, other = names.size();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto* const found = expert_mark(parameters[i]);
    if (!found) {
      other = i;
      continue;
    }
    mark = found;
    marked = i;
  }
  if (!mark) return std::nullopt;
  TORCH_CHECK_VALUE(other == names.size(), "fully_shard: the parameter ", names[marked], " is one ", where(*mark), ", and ",
                    names[other], " is none. Call fully_shard of the experts first: their gradients are divided otherwise");
  return static_cast<double>(ranks_of(*mark, mesh)) / static_cast<double>(mark->ranks_of_loss);
}

} // namespace tessera::internal
