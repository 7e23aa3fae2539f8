#pragma once

#include <tessera/dtensor/placement.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace tessera {

// How a layer takes part in tensor parallelism: how its parameters lie on the mesh, where the activations beside them are brought
// when an operator reads them, and how the results leave. A negative dim of a placement counts from the activation's last. The
// `input` of a style is how a plain activation lies; one that is a DTensor knows that itself.

/// The output features are split (PyTorch: ColwiseParallel): the weight of a linear layer by rows, that of an embedding by
/// columns, that of a convolution by output channels, and the bias alike. The activation beside it is made whole. The result
/// stays split over its features, unless `output` says where it goes.
///
/// `packed`: the output is so many blocks, each of which is split over the ranks, as the q, k and v that one projection makes.
/// torch::nn::MultiheadAttention, to which this style applies as well, always has its three.
///
/// `heads`: the output, or each of its blocks, is so many heads, none of which is to be split: an error where the ranks do not
/// divide them. 0: it is not known. torch::nn::MultiheadAttention knows its own.
struct Colwise {
  Placement input = Replicate{};
  std::optional<Placement> output = {};
  int64_t packed = 1;
  int64_t heads = 0;
};

/// The output features are `heads` heads of keys, or of values, which groups of queries share. Where the ranks divide them this
/// is Colwise. Where they do not, as with fewer heads than ranks, each rank has all parameters, and the ranks form as many groups
/// as the heads and the ranks have in common, their greatest common divisor: 4 ranks with 2 heads are 2 groups of 2. The ranks of
/// a group compute its share of the heads, all of them the same, and attention takes those of the rank's queries:
/// scaled_dot_product_attention with `enable_gqa`, or with keys that were repeated for it. Gradients are summed over the ranks,
/// and a checkpoint has one copy. Between the layer and attention such keys are DTensors of a mesh of two dims, [groups, ranks of
/// one]; other operators that read them beside activations of `mesh` get them whole. A layer of codes (float8_linear), and one
/// with a PrepareOutput, is computed whole on each rank.
struct KeyHeads {
  int64_t heads = 1;
  Placement input = Replicate{};
};

/// The input features are split (PyTorch: RowwiseParallel): the weight of a linear layer by columns, that of an embedding by
/// rows, that of a convolution by input channels. The bias is whole. The activation is split over its features, and the result, a
/// sum over the ranks, goes where `output` says.
struct Rowwise {
  Placement input = Replicate{};
  Placement output = Replicate{};
};

/// The rows of a table are split, evenly or not: what is looked up goes where `output` says. Where the table is the weight of a
/// linear layer too, as a tied head is, that one is Colwise.
struct VocabParallel {
  Placement output = Replicate{};
};

/// Each rank has all parameters, and activations are split over dim `dim`, the sequence (PyTorch: SequenceParallel): for norms
/// and dropout between the layers that are Colwise and Rowwise.
struct Sequence {
  int64_t dim = 1;
};

/// Each rank has all parameters, and activations stay as they are. What no line of a plan names is Replicated.
struct Replicated {};

/// The activations beside the module's own parameters go to `desired` (PyTorch: PrepareModuleInput). It joins another style of
/// the module, by default Replicated.
struct PrepareInput {
  Placement desired = Replicate{};
  Placement input = Replicate{};
};

/// What the module's own parameters give goes to `desired` (PyTorch: PrepareModuleOutput). It joins another style of the module.
struct PrepareOutput {
  Placement desired = Replicate{};
};

using ParallelStyle = std::variant<Colwise, KeyHeads, Rowwise, VocabParallel, Sequence, Replicated, PrepareInput, PrepareOutput>;

/// The style of the modules that `modules` names: a path below the module of the plan, "blocks.0.attention.qkv", of which each
/// part may have wildcards: "blocks.*.attention.qkv", "layers.[0-3].up". `*` stands for any text without a dot, `?` for one
/// character, and "" for the module itself.
struct PlanLine {
  std::string modules;
  ParallelStyle style;
};
using ParallelPlan = std::vector<PlanLine>;

/// "Colwise(packed 3)", "Rowwise(output Shard(1))".
std::string to_string(const ParallelStyle& style);
/// One line a line of the plan.
std::string to_string(const ParallelPlan& plan);

} // namespace tessera
