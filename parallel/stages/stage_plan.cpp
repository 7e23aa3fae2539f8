#include <tessera/parallel/stages/stage_plan.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

#include <tessera/base/listing.h>
#include <tessera/dtensor/api.h>
#include <tessera/parallel/pipeline/schedule_shapes.h>
#include <tessera/parallel/stages/names.h>

namespace tessera::internal::pipeline {

namespace {

std::vector<int64_t> ranks_of_stages(int64_t ranks, const PipelineSplit& options) {
  if (options.rank_of_stage.empty()) {
    TORCH_CHECK_VALUE(options.chunks >= 1, "split: ", options.chunks, " chunks, of which a rank needs 1");
    return looped_ranks(ranks, options.chunks);
  }
  std::vector<bool> has_stage(static_cast<size_t>(ranks));
  for (const auto rank : options.rank_of_stage) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < ranks, "split: rank_of_stage has the rank ", rank, ", and the pipeline ", ranks,
                      " ranks");
    has_stage[static_cast<size_t>(rank)] = true;
  }
  const auto none = std::find(has_stage.begin(), has_stage.end(), false);
  TORCH_CHECK_VALUE(none == has_stage.end(), "split: rank_of_stage gives rank ", none - has_stage.begin(), " no stage");
  return options.rank_of_stage;
}

bool belongs_to(const ModelTensor& tensor, const std::vector<std::string>& members) {
  return std::any_of(members.begin(), members.end(), [&](const std::string& member) {
    return std::any_of(tensor.names.begin(), tensor.names.end(), [&](const auto& name) { return is_below(name, member); });
  });
}

std::string list_of(const PipelineLayers& layers, const ModelTensor& tensor, const std::vector<int64_t>& bounds) {
  std::string text;
  for (const auto layer : tensor.layers) {
    const auto stage = std::upper_bound(bounds.begin(), bounds.end(), static_cast<int64_t>(layer)) - bounds.begin() - 1;
    text += c10::str(text.empty() ? "" : ", ", "'", layers.layers()[layer].name, "' (stage ", stage, ")");
  }
  return text;
}

} // namespace

StagePlan::StagePlan(const PipelineLayers& layers, int64_t ranks, const PipelineSplit& options)
    : rank_of_stage(ranks_of_stages(ranks, options)) {
  const auto stages = std::ssize(rank_of_stage), count = std::ssize(layers.layers());
  TORCH_CHECK_VALUE(count >= stages, "split: ", count, " layers are fewer than the ", stages, " stages on ", ranks, " ranks");
  take_tensors(layers);
  take_sizes(layers, options.costs);
  TORCH_CHECK_VALUE(options.bounds.empty() || options.costs.empty(),
                    "split: bounds and costs were given; either says where to cut");
  bounds = options.bounds.empty() ? balanced_bounds(sizes, stages) : given_bounds(options.bounds, sizes, stages);
  take_stages(layers);
}

void StagePlan::take_tensors(const PipelineLayers& layers) {
  std::map<const void*, size_t> places;
  const auto take = [&](const auto& items, bool are_parameters) {
    for (const auto& item : items) {
      const auto [place, is_new] = places.emplace(item.value().unsafeGetTensorImpl(), tensors.size());
      if (is_new) tensors.push_back({.tensor = item.value(), .is_parameter = are_parameters});
      tensors[place->second].names.push_back(item.key());
    }
  };
  take(layers.model().named_parameters(), true);
  take(layers.model().named_buffers(), false);
  std::vector<std::string> left;
  for (auto& each : tensors) {
    for (size_t i = 0; i < layers.layers().size(); ++i) {
      if (belongs_to(each, layers.layers()[i].members)) each.layers.insert(i);
    }
    if (each.layers.empty()) left.push_back(each.names[0]);
    TORCH_CHECK_VALUE(!is_dtensor(each.tensor), "split: ", each.names[0],
                      " is a DTensor already: split the model before parallelize and fully_shard");
  }
  TORCH_CHECK_VALUE(left.empty(), "split: these parameters or buffers of the model are members of no layer:", listing(left));
}

void StagePlan::take_sizes(const PipelineLayers& layers, const std::vector<double>& costs) {
  sizes.resize(layers.layers().size());
  TORCH_CHECK_VALUE(costs.empty() || costs.size() == sizes.size(), "split: ", costs.size(), " costs for ", sizes.size(),
                    " layers");
  for (const auto& each : tensors) {
    for (const auto layer : each.layers) sizes[layer].parameters += each.is_parameter ? each.tensor.numel() : 0;
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    sizes[i].cost = costs.empty() ? static_cast<double>(sizes[i].parameters) : costs[i];
    TORCH_CHECK_VALUE(sizes[i].cost >= 0, "split: the cost of layer '", layers.layers()[i].name, "' is ", sizes[i].cost);
  }
}

void StagePlan::take_stages(const PipelineLayers& layers) {
  for (auto& each : tensors) {
    std::set<int64_t> stages, ranks;
    for (const auto layer : each.layers)
      stages.insert(std::upper_bound(bounds.begin(), bounds.end(), static_cast<int64_t>(layer)) - bounds.begin() - 1);
    for (const auto stage : stages) ranks.insert(rank_of_stage[static_cast<size_t>(stage)]);
    each.stages.assign(stages.begin(), stages.end());
    each.ranks.assign(ranks.begin(), ranks.end());
    if (!each.is_parameter || stages.size() == 1) continue;
    const bool is_declared = std::any_of(each.names.begin(), each.names.end(), [&](const std::string& name) {
      return std::count(layers.ties().begin(), layers.ties().end(), name) > 0;
    });
    TORCH_CHECK_VALUE(is_declared, "split: ", each.names[0], " is a parameter of the layers ", list_of(layers, each, bounds),
                      ", which lie in several stages. If it is to be one weight, say so with PipelineLayers::tie(\"",
                      each.names[0], "\")");
  }
}

bool StagePlan::is_in(const ModelTensor& tensor, const std::set<int64_t>& stages) {
  return std::any_of(tensor.stages.begin(), tensor.stages.end(), [&](int64_t stage) { return stages.contains(stage); });
}

std::string StagePlan::to_text(const PipelineLayers& layers) const {
  std::string text = c10::str("stages on ranks ", rank_of_stage, " with bounds ", bounds, "\n");
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += "layer '" + layers.layers()[i].name + "'";
    for (const auto& each : tensors) {
      if (!each.layers.contains(i)) continue;
      text += c10::str(" ", each.names[0], " ", each.tensor.scalar_type(), each.tensor.sizes(),
                       each.tensor.requires_grad() ? "" : " frozen");
    }
    text += '\n';
  }
  for (const auto& tie : layers.ties()) text += "tie " + tie + "\n";
  return text;
}

namespace {

/// A module of which a stage has a part.
class PartOfModule : public torch::nn::Module {
 public:
  using Module::Module;
};

class Mirror {
 public:
  Mirror(const PipelineLayers& layers, const StagePlan& plan, const std::set<int64_t>& stages) {
    for (const auto& each : plan.tensors) {
      if (StagePlan::is_in(each, stages)) owned_.insert(each.tensor.unsafeGetTensorImpl());
    }
    for (const auto stage : stages) {
      const auto at = static_cast<size_t>(stage);
      for (auto layer = plan.bounds[at]; layer < plan.bounds[at + 1]; ++layer) {
        const auto& members = layers.layers()[static_cast<size_t>(layer)].members;
        members_.insert(members.begin(), members.end());
      }
    }
  }

  /// Null where nothing below is the stages'.
  std::shared_ptr<torch::nn::Module> of(const torch::nn::Module& real, const std::string& path) const {
    auto part = std::make_shared<PartOfModule>("PartOf" + real.name());
    bool any = path.empty();
    for (const auto& item : real.named_parameters(/*recurse=*/false)) {
      if (!owned_.contains(item.value().unsafeGetTensorImpl())) continue;
      part->register_parameter(item.key(), item.value(), item.value().requires_grad());
      any = true;
    }
    for (const auto& item : real.named_buffers(/*recurse=*/false)) {
      if (!owned_.contains(item.value().unsafeGetTensorImpl())) continue;
      part->register_buffer(item.key(), item.value());
      any = true;
    }
    for (const auto& child : real.named_children()) {
      const auto name = path.empty() ? child.key() : path + "." + child.key();
      const auto below = members_.contains(name) ? child.value() : of(*child.value(), name);
      if (below) part->register_module(child.key(), below);
      any = any || below;
    }
    return any ? part : nullptr;
  }

 private:
  std::set<const void*> owned_;
  std::set<std::string> members_;
};

} // namespace

std::shared_ptr<torch::nn::Module> module_of_stages(const PipelineLayers& layers, const StagePlan& plan,
                                                    const std::set<int64_t>& stages) {
  return Mirror(layers, plan, stages).of(layers.model(), "");
}

} // namespace tessera::internal::pipeline
