#include <ATen/WrapDimUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>

#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/patterns.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::internal::rules {

namespace {

bool is_legacy_empty(const TensorArg& tensor) { return tensor.sizes.size() == 1 && tensor.sizes[0] == 0; }

/// The reductions that the Partial tensors keep where they are cast to the type that all promote to.
OpSet kept_by_promotion(const std::vector<TensorArg>& tensors) {
  auto result = tensors.at(0).dtype;
  for (const auto& tensor : tensors) result = c10::promoteTypes(result, tensor.dtype);
  auto kept = kAllOps;
  for (const auto& tensor : tensors) {
    if (tensor.spec && tensor.spec->has_partial()) kept = kept & kept_by_cast(tensor.dtype, result);
  }
  return kept;
}

Factorization cat(const OpCall& call) {
  const auto found = std::find_if_not(call.tensors.begin(), call.tensors.end(), is_legacy_empty);
  const auto& sizes = found == call.tensors.end() ? call.tensors.at(0).sizes : found->sizes;
  const auto ndim = static_cast<int64_t>(sizes.size());
  TORCH_CHECK(ndim > 0, call.name, ": 0-dim tensors cannot be concatenated");
  const auto dim = call.dim("dim", ndim);
  Factorization factors;
  auto output = fresh_dims(factors, sizes);
  output.factors[dim] = kNoFactor;
  output.sizes[dim] = 0;
  for (const auto& tensor : call.tensors) {
    const bool skipped = is_legacy_empty(tensor) && ndim != 1;
    if (!skipped) {
      TORCH_CHECK(static_cast<int64_t>(tensor.sizes.size()) == ndim, call.name, ": tensors of ", ndim, " and of ",
                  tensor.sizes.size(), " dims");
      output.sizes[dim] += tensor.sizes[dim];
    }
    factors.inputs.push_back(skipped ? whole_dims(tensor.sizes) : TensorDims{output.factors, tensor.sizes});
  }
  factors.add_output(std::move(output), kept_by_promotion(call.tensors), kEveryInput);
  if (dim == 0) factors.ragged = RaggedUse::kNone;
  const bool alike = std::all_of(call.tensors.begin(), call.tensors.end(), [&](const auto& each) { return each.sizes == sizes; });
  if (!alike || call.tensors.size() < 2) return factors;
  // Each rank's parts one after another: the gradients of q, k and v.
  factors.map_all = true;
  factors.map = [dim, size = sizes[dim], count = std::ssize(call.tensors)](const Placement& placement, const Placements& others,
                                                                           int64_t ranks) {
    const bool even = placement == Placement(Shard{dim}) && size > 0 && size % ranks == 0 && !any_sharded(others);
    return even ? std::vector<Placement>{StridedShard{dim, count}} : std::vector<Placement>{};
  };
  return factors;
}

Factorization stack(const OpCall& call) {
  Factorization factors;
  const auto& sizes = call.tensors.at(0).sizes;
  const auto dim = call.dim("dim", static_cast<int64_t>(sizes.size()) + 1);
  auto output = fresh_dims(factors, sizes);
  for (const auto& tensor : call.tensors) {
    TORCH_CHECK(tensor.sizes == sizes, call.name, ": the tensors have different shapes, ", c10::IntArrayRef(sizes), " and ",
                c10::IntArrayRef(tensor.sizes));
    factors.inputs.push_back(output);
  }
  output.factors.insert(output.factors.begin() + dim, kNoFactor);
  output.sizes.insert(output.sizes.begin() + dim, static_cast<int64_t>(call.tensors.size()));
  factors.add_output(std::move(output), kept_by_promotion(call.tensors), kEveryInput);
  if (dim == 0) factors.ragged = RaggedUse::kNone;
  return factors;
}

/// The operator needs whole rows along "dim"; every other dim is a batch.
Factorization along_dim(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& input = factors.inputs[0];
  const auto ndim = static_cast<int64_t>(input.sizes.size());
  if (ndim > 0) input.factors[call.dim("dim", ndim, -1)] = kNoFactor;
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    if (call.tensors[i].sizes == input.sizes) factors.inputs[i] = input;
  }
  auto output = input;
  if (ndim > 0 && call.find("k")) output.sizes[call.dim("dim", ndim, -1)] = kUnknownSize;
  factors.outputs.resize(call.output_count(), output);
  return factors;
}

/// A dim that the operator halves, or doubles again.
Factorization gated(const OpCall& call) {
  if (call.tensors.back().sizes.empty()) return whole_factors(call); // an error of the operator
  Factorization factors;
  auto self = fresh_dims(factors, call.tensors.back().sizes); // glu: self; glu_backward: gradient, self
  const auto dim = call.dim("dim", static_cast<int64_t>(self.sizes.size()), -1);
  self.factors[dim] = kNoFactor;
  if (call.tensors.size() > 1) factors.inputs.push_back({self.factors, call.tensors[0].sizes});
  factors.inputs.push_back(self);
  if (call.tensors.size() == 1) self.sizes[dim] = kUnknownSize;
  factors.outputs.push_back(std::move(self));
  if (dim == 0) factors.ragged = RaggedUse::kNone;
  return factors;
}

/// Windows of a dim, which is whole, become the last dim.
Factorization unfold(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& input = factors.inputs[0];
  if (input.sizes.empty()) return whole_factors(call);
  const auto dim = call.dim("dimension", static_cast<int64_t>(input.sizes.size()));
  input.factors[dim] = kNoFactor;
  auto output = input;
  output.sizes[dim] = kUnknownSize;
  output.add(kNoFactor, kUnknownSize);
  factors.outputs.push_back(std::move(output));
  if (dim == 0) factors.ragged = RaggedUse::kNone;
  return factors;
}

/// The last two dims are whole.
Factorization matrix(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& input = factors.inputs[0];
  const auto ndim = input.sizes.size();
  TORCH_CHECK(ndim >= 2, call.name, " needs at least 2 dims, not ", ndim);
  input.factors[ndim - 1] = input.factors[ndim - 2] = kNoFactor;
  factors.add_output(input, kLinearOps);
  return factors;
}

/// The backward of a view that cut a dim or, for a diagonal, two: in the output, and in the gradient as far as that has them,
/// they are not split.
Factorization uncut(const OpCall& call) {
  const auto sizes = call.integers("input_sizes");
  if (sizes.empty()) return whole_factors(call);
  std::vector<int64_t> whole;
  for (const auto* argument : {"dim", "dim1", "dim2"}) {
    if (call.find(argument)) whole.push_back(call.dim(argument, static_cast<int64_t>(sizes.size())));
  }
  const bool dropped = call.tensors[0].sizes.size() < sizes.size();
  Factorization factors;
  auto output = fresh_dims(factors, sizes);
  for (const auto dim : whole) output.factors[dim] = kNoFactor;
  TensorDims gradient{{}, call.tensors[0].sizes};
  for (size_t d = 0; d < sizes.size(); ++d) {
    const bool cut = std::find(whole.begin(), whole.end(), static_cast<int64_t>(d)) != whole.end();
    if (!cut || !dropped) gradient.factors.push_back(output.factors[d]);
  }
  gradient.factors.resize(gradient.sizes.size(), kNoFactor); // a diagonal is the last dim
  factors.inputs.push_back(std::move(gradient));
  factors.add_output(std::move(output), kLinearOps);
  if (std::find(whole.begin(), whole.end(), 0) != whole.end()) factors.ragged = RaggedUse::kNone;
  return factors;
}

/// The positions that a slice takes of a dim of `size`.
struct SliceRange {
  int64_t first, last;
};
SliceRange slice_range(const c10::IValue& start, const c10::IValue& end, int64_t size) {
  const auto at = [size](const c10::IValue& value, int64_t otherwise) {
    const auto position = value.isInt() ? value.toInt() : otherwise;
    return std::clamp<int64_t>(position < 0 ? position + size : position, 0, size);
  };
  const auto first = at(start, 0);
  return {first, std::max(first, at(end, size))};
}

/// The gradient of whole chunks of a StridedShard (the q, or the k and v, of a packed projection) is one of it, zero elsewhere.
Factorization slice_backward(const OpCall& call) {
  auto factors = uncut(call);
  const auto sizes = call.integers("input_sizes");
  if (sizes.empty() || call.integer("step", 1) != 1) return factors;
  const auto dim = call.dim("dim", static_cast<int64_t>(sizes.size())), size = sizes[dim];
  const auto [first, last] = slice_range(*call.find("start"), *call.find("end"), size);
  factors.map = [=, start = first, count = last - first](const Placement& placement, const Placements& others,
                                                         int64_t ranks) -> std::vector<Placement> {
    const auto* strided = std::get_if<StridedShard>(&placement);
    const auto chunks = strided ? strided->split_factor : 1;
    const bool splits = strided || std::holds_alternative<Shard>(placement);
    if (!splits || !shards_dim(placement, dim) || any_sharded(others) || count == 0 || count % (chunks * ranks) != 0) return {};
    const auto chunk = count / chunks;
    if (start % chunk != 0 || size % chunk != 0 || size == chunk) return {};
    return {StridedShard{dim, size / chunk}};
  };
  return factors;
}

void uncut_local(const LocalCall& call) {
  if (!call.outputs.empty()) *call.find("input_sizes") = call.outputs[0].local_sizes;
  call.op.callBoxed(*call.stack);
}

void slice_backward_local(const LocalCall& call) {
  const auto sizes = call.find("input_sizes")->toIntVector();
  auto dim = call.find("dim")->toInt();
  dim = dim < 0 ? dim + static_cast<int64_t>(sizes.size()) : dim;
  const auto own = call.outputs.empty() || sizes.empty() ? 0 : call.outputs[0].local_sizes[dim];
  if (own > 0 && own != sizes[dim]) {
    auto &start = *call.find("start"), &end = *call.find("end");
    const auto [first, last] = slice_range(start, end, sizes[dim]);
    start = first / (sizes[dim] / own);
    end = last / (sizes[dim] / own);
  }
  uncut_local(call);
}

/// flip, roll: the named dims are whole; all of them without names.
Factorization reordered(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& input = factors.inputs[0];
  const bool all = call.integers("dims").empty();
  const auto named = call.named_dims("dims");
  for (size_t d = 0; d < named.size(); ++d) {
    if (all || named[d]) input.factors[d] = kNoFactor;
  }
  factors.add_output(input, kAllOps);
  return factors;
}

/// rot90(input, k, dims). PyTorch's kernel transposes its result in place, which a tensor whose data must move cannot.
void rot90(const c10::OperatorHandle& /*op*/, std::vector<c10::IValue>* stack) {
  const auto dims = torch::jit::pop(*stack).toIntVector();
  const auto turns = ((torch::jit::pop(*stack).toInt() % 4) + 4) % 4;
  const auto input = torch::jit::pop(*stack).toTensor();
  TORCH_CHECK(dims.size() == 2, "aten::rot90: expected total rotation dims == 2, but got dims = ", dims.size());
  TORCH_CHECK(input.dim() >= 2, "aten::rot90: expected total dims >= 2, but got total dims = ", input.dim());
  TORCH_CHECK(at::maybe_wrap_dim(dims[0], input.dim()) != at::maybe_wrap_dim(dims[1], input.dim()),
              "aten::rot90: expected rotation dims to be different, but got dim0 = ", dims[0], " and dim1 = ", dims[1]);
  if (turns % 2 == 0) {
    stack->emplace_back(turns == 0 ? input.clone(at::MemoryFormat::Contiguous) : input.flip(dims));
  } else {
    stack->emplace_back(input.transpose(dims[0], dims[1]).flip({turns == 1 ? dims[0] : dims[1]}));
  }
}

/// The last dim becomes the diagonal of two dims, which are whole.
Factorization diag_embed(const OpCall& call) {
  const auto ndim = static_cast<int64_t>(call.tensors[0].sizes.size()) + 1;
  const auto first = call.dim("dim1", ndim, -2), second = call.dim("dim2", ndim, -1);
  const bool last = std::min(first, second) == ndim - 2 && std::max(first, second) == ndim - 1;
  return last ? pattern_factors(call, "...*->...**") : whole_factors(call);
}

} // namespace

void register_shapes(Registry& registry) {
  registry.add("cat", OnLocals(cat));
  registry.add("stack", OnLocals(stack));
  registry.add("cumsum cumprod sort sort.stable _safe_softmax logcumsumexp cummax cummin topk", OnLocals(along_dim));
  registry.add("slice_backward", OnLocals(slice_backward).run(slice_backward_local, KernelKind::kAnyOffsets));
  registry.add("select_backward unfold_backward diagonal_backward", OnLocals(uncut).run(uncut_local));
  registry.add("unfold", OnLocals(unfold));
  registry.add("glu glu_backward", OnLocals(gated));
  registry.add("flip roll", OnLocals(reordered));
  registry.add("rot90.", Handler(rot90));
  registry.add("diag_embed", OnLocals(diag_embed));
  registry.add("tril triu", OnLocals(matrix));
}

} // namespace tessera::internal::rules
