#include <tessera/parallel/tensor/placing.h>

#include <absl/algorithm/container.h>
#include <absl/strings/match.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/parallel/tensor/key_heads.h>

namespace tessera::internal::parallel {

namespace {

constexpr int64_t kBlocksOfAttention = 3; // q, k and v

/// What a module does with its own weight.
enum class Layer : uint8_t {
  kNone, ///< nothing that a split of features fits
  kLinear,
  kConvolution,
  kTable,
  kAttention,
};

/// A module under a style, and what is wrong with that.
struct Planned {
  const NamedModule& of;
  const ParallelStyle& style;

  template <typename... Problem>
  [[noreturn]] void refuse(const Problem&... problem) const {
    TORCH_CHECK_VALUE(false, "parallelize (rank ", process_context().rank(), "): the module '", of.path, "' (", of.module->name(),
                      ") is planned as ", to_string(style), problem...);
  }
  std::string full_name(const std::string& parameter) const { return of.path.empty() ? parameter : of.path + "." + parameter; }
};

bool is_recurrent(const torch::nn::Module& module) {
  const auto names = module.named_parameters(/*recurse=*/false);
  return absl::c_any_of(names, [](const auto& item) { return absl::StartsWith(item.key(), "weight_ih"); });
}

void check_convolution(const Planned& planned) {
  const auto check = [&](const auto* convolution) {
    if (!convolution) return;
    if (convolution->options.groups() != 1)
      planned.refuse(", but its channels are in ", convolution->options.groups(), " groups, which are not split");
    if (convolution->options.transposed()) planned.refuse(", but no style splits a transposed convolution");
  };
  check(planned.of.module->as<torch::nn::Conv1dImpl>());
  check(planned.of.module->as<torch::nn::Conv2dImpl>());
  check(planned.of.module->as<torch::nn::Conv3dImpl>());
}

Layer layer_of(const Planned& planned) {
  auto& module = *planned.of.module;
  if (module.as<torch::nn::EmbeddingImpl>()) return Layer::kTable;
  if (is_recurrent(module))
    planned.refuse(
        ", but a recurrent layer reads its output at every step, which no style splits. Leave it out of the plan: it "
        "is then replicated");
  const auto parameters = module.named_parameters(/*recurse=*/false);
  if (parameters.contains("in_proj_weight")) return Layer::kAttention;
  const auto* const weight = parameters.find("weight");
  if (!weight) return Layer::kNone;
  if (weight->dim() == 2) return Layer::kLinear;
  if (weight->dim() < 3) return Layer::kNone;
  if (absl::StrContains(module.name(), "Transpose")) planned.refuse(", but no style splits a transposed convolution");
  check_convolution(planned);
  return Layer::kConvolution;
}

/// The numbers of ranks that divide `size`, of which there may be many.
std::string divisors(int64_t size) {
  constexpr int64_t kMost = 64;
  std::vector<int64_t> found;
  for (int64_t ranks = 1; ranks <= std::min(size, kMost); ++ranks) {
    if (size % ranks == 0) found.push_back(ranks);
  }
  return fmt::format("{}", fmt::join(found, ", "));
}

void check_divides(const PlacedParameter& parameter, const DeviceMesh& mesh) {
  const auto* shard = std::get_if<Shard>(&parameter.placement);
  const auto* strided = std::get_if<StridedShard>(&parameter.placement);
  if ((!shard && !strided) || parameter.may_be_uneven) return;
  const auto dim = shard ? shard->dim : strided->dim, blocks = strided ? strided->split_factor : 1;
  const auto size = parameter.tensor.size(dim);
  TORCH_CHECK_VALUE(size % blocks == 0, "parallelize (rank ", process_context().rank(), "): dim ", dim, " of the parameter ",
                    parameter.name, " ", parameter.tensor.sizes(), " is ", size, ", which are not ", blocks,
                    " blocks of one size");
  TORCH_CHECK_VALUE(size % (blocks * mesh.size()) == 0, "parallelize (rank ", process_context().rank(), "): dim ", dim,
                    " of the parameter ", parameter.name, " ", parameter.tensor.sizes(), " is ", size,
                    blocks > 1 ? fmt::format(", {} blocks of {}", blocks, size / blocks) : "", ", which the ", mesh.size(),
                    " ranks of ", mesh.to_string(), " do not divide; numbers of ranks that do: ", divisors(size / blocks));
}

/// An error where a rank would have a part of a head.
void check_heads(const Planned& planned, int64_t heads, const DeviceMesh& mesh) {
  if (heads % mesh.size() != 0)
    planned.refuse(", but its ", heads, " heads are not divided by the ", mesh.size(), " ranks of ", mesh.to_string(),
                   "; numbers of ranks that do: ", divisors(heads));
}

/// An error where the output features are not so many heads of one size.
void check_are_heads(const Planned& planned, int64_t features, int64_t heads) {
  if (heads < 1 || features % heads != 0) planned.refuse(", but its ", features, " output features are not ", heads, " heads");
}

/// `dim` of the weight in `blocks`.
Placement split(int64_t dim, int64_t blocks) { return blocks > 1 ? Placement(StridedShard{dim, blocks}) : Placement(Shard{dim}); }

Placement colwise(const std::string& key, const at::Tensor& parameter, Layer layer, int64_t packed) {
  const bool is_weight = key == "weight", is_bias = key == "bias";
  if (layer == Layer::kTable) return Shard{1};
  if (layer != Layer::kAttention) return is_weight || is_bias ? split(0, packed) : Placement(Replicate{});
  if (absl::StartsWith(key, "in_proj")) return split(0, kBlocksOfAttention);
  if (absl::EndsWith(key, "_proj_weight")) return Shard{0};
  return Shard{parameter.dim() - 1}; // bias_k, bias_v
}

Placement rowwise(const std::string& key, Layer layer) {
  if (key != "weight") return Replicate{};
  return Shard{layer == Layer::kTable ? 0 : 1};
}

/// Calls `use(key, parameter)` with the module's own parameters, and makes what it sets of them.
template <typename Use>
std::vector<PlacedParameter> place_each(const Planned& planned, const DeviceMesh& mesh, const Use& use) {
  std::vector<PlacedParameter> all;
  for (const auto& item : planned.of.module->named_parameters(/*recurse=*/false)) {
    PlacedParameter parameter{planned.full_name(item.key()), item.value()};
    use(item.key(), parameter);
    check_divides(parameter, mesh);
    all.push_back(std::move(parameter));
  }
  return all;
}

struct Place {
  const Planned& planned;
  const DeviceMesh& mesh;

  std::vector<PlacedParameter> operator()(const Colwise& style) const {
    const auto layer = layer_of(planned);
    if (layer == Layer::kNone) planned.refuse(", but it has no weight of output and input features");
    if (style.packed < 1 || (style.packed > 1 && layer == Layer::kTable)) planned.refuse(", but it has no blocks");
    check_heads_of(style, layer);
    return place_each(planned, mesh, [&](const std::string& key, PlacedParameter& parameter) {
      parameter.placement = colwise(key, parameter.tensor, layer, style.packed);
      parameter.style.plain_input = style.input;
      (layer == Layer::kTable ? parameter.style.looked_up : parameter.style.output) = style.output;
    });
  }
  std::vector<PlacedParameter> operator()(const KeyHeads& style) const {
    if (layer_of(planned) != Layer::kLinear) planned.refuse(", but it is no projection of output and input features");
    check_are_heads(planned, planned.of.module->named_parameters(/*recurse=*/false)["weight"].size(0), style.heads);
    if (style.heads % mesh.size() == 0) return (*this)(Colwise{.input = style.input, .heads = style.heads});
    auto all = (*this)(PrepareInput{.desired = Replicate{}, .input = style.input});
    for (auto& parameter : all) {
      parameter.style.groups = in_groups(mesh, style.heads);
      parameter.style.has_terms = true; // of the ranks' queries
    }
    return all;
  }
  std::vector<PlacedParameter> operator()(const Rowwise& style) const {
    const auto layer = layer_of(planned);
    if (layer == Layer::kNone || layer == Layer::kAttention)
      planned.refuse(", but it has no weight of output and input features");
    return place_each(planned, mesh, [&](const std::string& key, PlacedParameter& parameter) {
      parameter.placement = rowwise(key, layer);
      parameter.may_be_uneven = layer == Layer::kTable;
      parameter.style.plain_input = style.input;
      (layer == Layer::kTable ? parameter.style.looked_up : parameter.style.output) = style.output;
    });
  }
  std::vector<PlacedParameter> operator()(const VocabParallel& style) const {
    const auto layer = layer_of(planned);
    if (layer != Layer::kTable && layer != Layer::kLinear) planned.refuse(", but it has no table with a row a token");
    return place_each(planned, mesh, [&](const std::string& key, PlacedParameter& parameter) {
      if (key == "weight") parameter.placement = Shard{0};
      parameter.may_be_uneven = true;
      parameter.style.looked_up = style.output;
    });
  }
  std::vector<PlacedParameter> operator()(const Sequence& style) const {
    return place_each(planned, mesh,
                      [&](const std::string&, PlacedParameter& parameter) { parameter.style.input = Shard{style.dim}; });
  }
  std::vector<PlacedParameter> operator()(const Replicated& /*style*/) const {
    return place_each(planned, mesh, [](const std::string&, PlacedParameter&) {});
  }
  std::vector<PlacedParameter> operator()(const PrepareInput& style) const {
    check_has_parameters();
    return place_each(planned, mesh, [&](const std::string&, PlacedParameter& parameter) {
      parameter.style.plain_input = style.input;
      parameter.style.input = style.desired;
    });
  }
  std::vector<PlacedParameter> operator()(const PrepareOutput& style) const {
    check_has_parameters();
    return place_each(planned, mesh, [&](const std::string&, PlacedParameter& parameter) {
      parameter.style.output = parameter.style.looked_up = style.desired;
    });
  }

 private:
  void check_heads_of(const Colwise& style, Layer layer) const {
    auto& module = *planned.of.module;
    if (const auto* attention = module.as<torch::nn::MultiheadAttentionImpl>())
      return check_heads(planned, attention->options.num_heads(), mesh);
    if (style.heads == 0) return;
    if (layer != Layer::kLinear) planned.refuse(", but it is no projection of output and input features");
    check_are_heads(planned, module.named_parameters(/*recurse=*/false)["weight"].size(0) / style.packed, style.heads);
    check_heads(planned, style.heads, mesh);
  }
  void check_has_parameters() const {
    if (planned.of.module->parameters(/*recurse=*/false).empty())
      planned.refuse(", but it has no parameters of its own, at whose reads activations are moved: plan the modules below it");
  }
};

} // namespace

std::vector<PlacedParameter> place(const NamedModule& module, const ParallelStyle& style, const DeviceMesh& mesh) {
  return std::visit(Place{{module, style}, mesh}, style);
}

bool joins(const ParallelStyle& style) {
  return std::holds_alternative<PrepareInput>(style) || std::holds_alternative<PrepareOutput>(style);
}

} // namespace tessera::internal::parallel
