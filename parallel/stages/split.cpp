#include <tessera/parallel/pipeline_stages.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string_view>

#include <tessera/base/error_text.h>
#include <tessera/base/text_table.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/parallel/stages/foreign.h>
#include <tessera/parallel/stages/names.h>
#include <tessera/parallel/stages/stage_plan.h>

namespace tessera {

using internal::pipeline::StagePlan;

namespace {

/// An error on one rank is one on all, and all have the same list.
StagePlan agreed_plan(const PipelineLayers& layers, const DeviceMesh& mesh, const PipelineSplit& options) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1, "split: the mesh of a pipeline has one dim, and ", mesh.to_string(), " has ", mesh.ndim());
  const auto communicator = mesh.communicator(0, "pipeline");
  std::optional<StagePlan> plan;
  std::string failure;
  try {
    plan.emplace(layers, mesh.size(), options);
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  }
  internal::throw_failures(failure, *communicator, mesh.device(), "layers of a pipeline");
  const auto texts =
      internal::gather_texts_that_differ(plan->to_text(layers), *communicator, mesh.device(), "layers of a pipeline");
  TORCH_CHECK_VALUE(texts.empty(), "split: the ranks of the pipeline have different layers: ",
                    internal::first_difference(texts, communicator->ranks(), "layer"));
  return std::move(*plan);
}

std::set<int64_t> stages_of(int64_t rank, const std::vector<int64_t>& rank_of_stage) {
  std::set<int64_t> stages;
  for (size_t stage = 0; stage < rank_of_stage.size(); ++stage) {
    if (rank_of_stage[stage] == rank) stages.insert(static_cast<int64_t>(stage));
  }
  return stages;
}

std::vector<PipelineTie> ties_of(const StagePlan& plan) {
  std::vector<PipelineTie> ties;
  for (const auto& each : plan.tensors) {
    if (each.is_parameter && each.stages.size() > 1) ties.push_back({each.names[0], each.stages, each.ranks});
  }
  return ties;
}

void drop_others(const PipelineStages& stages, const StagePlan& plan, const std::set<int64_t>& own) {
  for (const auto& each : plan.tensors) {
    if (!StagePlan::is_in(each, own))
      internal::pipeline::make_foreign(each.tensor, each.names[0], stages.describe(each.stages[0]));
  }
}

} // namespace

PipelineStages split(const PipelineLayers& layers, const DeviceMesh& mesh, const PipelineSplit& options) {
  const auto plan = agreed_plan(layers, mesh, options);
  PipelineStages stages{.layers = layers, .mesh = mesh, .rank_of_stage = plan.rank_of_stage, .bounds = plan.bounds};
  for (size_t stage = 0; stage < plan.rank_of_stage.size(); ++stage) {
    stages.costs.push_back(std::accumulate(plan.sizes.begin() + plan.bounds[stage], plan.sizes.begin() + plan.bounds[stage + 1],
                                           0.0, [](double sum, const auto& each) { return sum + each.cost; }));
  }
  const auto own = stages_of(stages.rank(), plan.rank_of_stage);
  for (const auto index : own) {
    const auto at = static_cast<size_t>(index);
    stages.local.push_back({.index = index,
                            .begin = plan.bounds[at],
                            .end = plan.bounds[at + 1],
                            .module = internal::pipeline::module_of_stages(layers, plan, {index})});
  }
  stages.module = own.size() == 1 ? stages.local[0].module : internal::pipeline::module_of_stages(layers, plan, own);
  stages.ties = ties_of(plan);
  drop_others(stages, plan, own);
  return stages;
}

std::string PipelineStages::describe(int64_t stage) const {
  const auto at = static_cast<size_t>(stage);
  const auto& first = layers.layers()[static_cast<size_t>(bounds[at])].name;
  const auto& last = layers.layers()[static_cast<size_t>(bounds[at + 1] - 1)].name;
  if (first == last) return c10::str("stage ", stage, " (layer '", first, "')");
  return c10::str("stage ", stage, " (layers '", first, "' to '", last, "')");
}

namespace {

/// Whether an entry of a state dict, such as "optimizer.state.tokens.weight.exp_avg", has `name` in it.
bool has_name(std::string_view entry, std::string_view name) {
  const auto at = entry.find(name);
  if (at == std::string_view::npos) return false;
  const auto end = at + name.size();
  const bool is_whole = (at == 0 || entry[at - 1] == '.') && (end == entry.size() || entry[end] == '.');
  return is_whole || has_name(entry.substr(at + 1), name);
}

/// The longest name of a parameter that the entry has in it: the parameter that it is of.
std::string parameter_of(const std::string& entry, const torch::nn::Module& model) {
  std::string longest;
  for (const auto& [name, parameter] : internal::pipeline::ModelNames(model).parameters) {
    if (name.size() > longest.size() && has_name(entry, name)) longest = name;
  }
  return longest;
}

} // namespace

bool PipelineStages::is_copy(const std::string& name) const {
  const auto is_candidate = [&](const PipelineTie& tie) {
    return tie.ranks[0] != rank() && std::count(tie.ranks.begin(), tie.ranks.end(), rank()) > 0 && has_name(name, tie.name);
  };
  const auto found = std::find_if(ties.begin(), ties.end(), is_candidate);
  return found != ties.end() && parameter_of(name, layers.model()) == found->name;
}

std::string to_string(const PipelineStages& stages) {
  const double mean =
      std::accumulate(stages.costs.begin(), stages.costs.end(), 0.0) / static_cast<double>(std::max<int64_t>(1, stages.count()));
  std::vector<internal::TextRow> rows{{"stage", "rank", "layers", "cost", "of the mean"}};
  for (int64_t stage = 0; stage < stages.count(); ++stage) {
    const auto at = static_cast<size_t>(stage);
    const auto& first = stages.layers.layers()[static_cast<size_t>(stages.bounds[at])].name;
    const auto& last = stages.layers.layers()[static_cast<size_t>(stages.bounds[at + 1] - 1)].name;
    rows.push_back({std::to_string(stage), std::to_string(stages.rank_of_stage[at]), first == last ? first : first + " … " + last,
                    fmt::format("{:.6g}", stages.costs[at]), mean > 0 ? fmt::format("{:.2f}", stages.costs[at] / mean) : "-"});
  }
  return internal::text_table(rows, {"stage", "rank", "cost", "of the mean"});
}

} // namespace tessera
