#include <tessera/parallel/parallelize.h>

#include <absl/container/flat_hash_map.h>
#include <absl/strings/match.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/calls/planned_meshes.h>
#include <tessera/fsdp/group/expert_mark.h>
#include <tessera/fsdp/group/sharded_parameter.h>
#include <tessera/parallel/tensor/placing.h>

namespace tessera::internal::parallel {

namespace {

/// A parameter's name, in errors.
struct ParameterText final : TensorName {
  explicit ParameterText(std::string name) : name_(std::move(name)) {}
  std::string to_string() const override { return "the parameter " + name_; }

 private:
  std::string name_;
};

void check_free(const at::Tensor& parameter, const std::string& name) {
  const auto check = [&](bool holds, const auto&... problem) {
    TORCH_CHECK_VALUE(holds, "parallelize (rank ", process_context().rank(), "): the parameter ", name, problem...);
  };
  check(!parameter_meta(parameter), " is sharded by fully_shard already: call parallelize before it");
  check(!styled_meta(parameter), " is parallel already: call parallelize once, with a plan of the whole module");
  check(!expert_mark(parameter), " is one of experts that expert_parallel has split: no line of a plan names it");
  check(!dtensor_meta(parameter), " is a DTensor already");
  check(parameter.is_leaf(), " is no leaf: it was computed from other tensors");
}

/// What all lines want of each parameter.
class Plan {
 public:
  Plan(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& lines) {
    const auto modules = modules_below(module);
    for (const bool joining : {false, true}) {
      for (const auto& line : lines) {
        if (joins(line.style) != joining) continue;
        for (const auto& each : modules_of(line, modules)) {
          for (auto& parameter : place(each, line.style, mesh)) add(std::move(parameter), line, joining);
        }
      }
    }
    for (const auto& item : module.named_parameters()) {
      const bool is_placed = places_.contains(item.value().unsafeGetTensorImpl());
      if (!is_placed && !expert_mark(item.value())) take({item.key(), item.value()}, "");
    }
    for (const auto& [parameter, line] : parameters_) check_free(parameter.tensor, parameter.name);
  }

  std::vector<std::pair<PlacedParameter, std::string>>& parameters() { return parameters_; }

 private:
  void take(PlacedParameter parameter, const std::string& line) {
    places_[parameter.tensor.unsafeGetTensorImpl()] = parameters_.size();
    parameters_.emplace_back(std::move(parameter), line);
  }

  void add(PlacedParameter parameter, const PlanLine& line, bool joining) {
    const auto found = places_.find(parameter.tensor.unsafeGetTensorImpl());
    if (found == places_.end()) return take(std::move(parameter), line.modules);
    auto& [known, by] = parameters_[found->second];
    if (!joining) check_agrees(known, by, parameter, line);
    const auto merge = [](auto& into, const auto& from) {
      if (from) into = from;
    };
    merge(known.style.input, parameter.style.input);
    merge(known.style.output, parameter.style.output);
    merge(known.style.looked_up, parameter.style.looked_up);
  }

  /// A tensor that two modules have, as a tied head and a table, may have a line for each.
  static void check_agrees(const PlacedParameter& known, const std::string& by, const PlacedParameter& parameter,
                           const PlanLine& line) {
    const auto conflict = [](const auto& a, const auto& b) { return a && b && *a != *b; };
    const bool agrees = known.name != parameter.name && known.placement == parameter.placement &&
                        !conflict(known.style.input, parameter.style.input) &&
                        !conflict(known.style.output, parameter.style.output) &&
                        !conflict(known.style.looked_up, parameter.style.looked_up);
    TORCH_CHECK_VALUE(agrees, "parallelize (rank ", process_context().rank(), "): the parameter ", parameter.name,
                      known.name == parameter.name ? "" : ", which is " + known.name + " too,", " is planned twice: as ",
                      to_string(known.placement), " by '", by, "', and as ", to_string(parameter.placement), " by '",
                      line.modules, "' (", to_string(line.style), ")");
  }

  std::vector<std::pair<PlacedParameter, std::string>> parameters_; ///< with the names of their lines, in the plan's order
  absl::flat_hash_map<const c10::TensorImpl*, size_t> places_;
};

/// Whether a style brings activations to a split of what is no feature, or gives them so.
bool splits_activations(const Style& style) {
  const auto is_split = [](const std::optional<Placement>& placement) {
    const auto* shard = placement ? std::get_if<Shard>(&*placement) : nullptr;
    return shard && shard->dim >= 0;
  };
  return is_split(style.input) || is_split(style.output) || is_split(style.looked_up);
}

void become_parallel(const PlacedParameter& parameter, const DeviceMesh& mesh, bool is_beside_parts,
                     const ParallelizeOptions& options) {
  const auto& tensor = parameter.tensor;
  const at::NoGradGuard no_grad;
  const auto whole = distribute_tensor(tensor.detach(), mesh, {parameter.placement});
  auto meta = c10::make_intrusive<DTensorMeta>(dtensor_meta(whole)->local, dtensor_meta(whole)->spec);
  meta->provenance.name = c10::make_intrusive<ParameterText>(parameter.name);
  become_dtensor(tensor, std::move(meta));
  tensor.mutable_grad().reset();
  auto style = std::make_shared<Style>(parameter.style);
  style->name = dtensor_meta(tensor)->provenance.name;
  style->has_terms |= is_beside_parts;
  style->overlap = options.overlap;
  if (style->groups.defined()) dispatch::PlannedMeshes::instance().add_groups(style->groups, mesh);
  style->put_on(tensor, /*casts=*/false);
}

/// Running statistics are written where activations are read: as DTensors that all ranks have.
void replicate_statistics(torch::nn::Module& module, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  for (const auto& item : module.named_buffers()) {
    const auto& buffer = item.value();
    const bool is_statistic = absl::EndsWith(item.key(), "running_mean") || absl::EndsWith(item.key(), "running_var");
    if (!is_statistic || !buffer.defined() || is_dtensor(buffer)) continue;
    const auto whole = distribute_tensor(buffer.detach(), mesh, {Replicate{}});
    become_dtensor(buffer, c10::make_intrusive<DTensorMeta>(dtensor_meta(whole)->local, dtensor_meta(whole)->spec));
  }
}

} // namespace

} // namespace tessera::internal::parallel

namespace tessera {

void parallelize(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan, const ParallelizeOptions& options) {
  TORCH_CHECK_VALUE(mesh.defined() && mesh.ndim() == 1,
                    "parallelize: the mesh must have one dim, as mesh[\"tp\"] has, but it is ",
                    mesh.defined() ? mesh.to_string() : "undefined");
  TORCH_CHECK_VALUE(mesh.coordinate(), "parallelize: rank ", process_context().rank(), " is not in ", mesh.to_string());
  TORCH_CHECK_VALUE(options.overlap.chunks >= 1, "parallelize (rank ", process_context().rank(), "): ", options.overlap.chunks,
                    " chunks of an overlap; at least 1");
  internal::parallel::Plan whole(module, mesh, plan);
  auto& parameters = whole.parameters();
  // In the order of their names: all ranks send the same in turn, whatever order a plan's lines have there.
  std::sort(parameters.begin(), parameters.end(), [](const auto& a, const auto& b) { return a.first.name < b.first.name; });
  const bool splits = std::any_of(parameters.begin(), parameters.end(),
                                  [](const auto& each) { return internal::parallel::splits_activations(each.first.style); });
  for (const auto& [parameter, line] : parameters) internal::parallel::become_parallel(parameter, mesh, splits, options);
  internal::parallel::replicate_statistics(module, mesh);
  internal::dispatch::PlannedMeshes::instance().add(mesh);
}

} // namespace tessera
