#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/patterns.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::rules {

namespace {

/// Dims of one of several tensors of the same shape: a factor each, shared by all of them.
TensorDims shared_dims(const Factorization& factors, const std::vector<int64_t>& sizes, int64_t whole_dim) {
  TensorDims dims{{}, sizes};
  for (size_t d = 0; d < sizes.size(); ++d) {
    dims.factors.push_back(static_cast<int64_t>(d) == whole_dim || d >= factors.factors.size() ? kNoFactor : static_cast<int>(d));
  }
  return dims;
}

bool is_legacy_empty(const TensorArg& tensor) { return tensor.sizes.size() == 1 && tensor.sizes[0] == 0; }

Factorization cat(const OpCall& call) {
  Factorization factors;
  const TensorArg* first = nullptr;
  for (const auto& tensor : call.tensors) {
    if (!first && !is_legacy_empty(tensor)) first = &tensor;
  }
  if (!first) first = &call.tensors.at(0);
  const auto ndim = static_cast<int64_t>(first->sizes.size());
  TORCH_CHECK(ndim > 0, call.name, ": 0-dim tensors cannot be concatenated");
  const auto dim = call.dim("dim", ndim);
  auto sizes = first->sizes;
  for (const auto size : sizes) factors.add_factor(size);
  sizes[dim] = 0;
  for (const auto& tensor : call.tensors) {
    const bool skipped = is_legacy_empty(tensor) && ndim != 1;
    if (!skipped) {
      TORCH_CHECK(static_cast<int64_t>(tensor.sizes.size()) == ndim, call.name, ": tensors of ", ndim, " and of ",
                  tensor.sizes.size(), " dims");
      sizes[dim] += tensor.sizes[dim];
    }
    factors.inputs.push_back(skipped ? TensorDims{{kNoFactor}, tensor.sizes} : shared_dims(factors, tensor.sizes, dim));
  }
  factors.outputs.push_back(shared_dims(factors, sizes, dim));
  factors.partial.push_back(flow(kEveryInput, kAllOps));
  factors.leading_whole = dim > 0;
  return factors;
}

Factorization stack(const OpCall& call) {
  Factorization factors;
  const auto& sizes = call.tensors.at(0).sizes;
  const auto dim = call.dim("dim", static_cast<int64_t>(sizes.size()) + 1);
  for (const auto size : sizes) factors.add_factor(size);
  for (const auto& tensor : call.tensors) {
    TORCH_CHECK(tensor.sizes == sizes, call.name, ": the tensors have different shapes, ", c10::IntArrayRef(sizes), " and ",
                c10::IntArrayRef(tensor.sizes));
    factors.inputs.push_back(shared_dims(factors, sizes, -1));
  }
  auto output = shared_dims(factors, sizes, -1);
  output.factors.insert(output.factors.begin() + dim, kNoFactor);
  output.sizes.insert(output.sizes.begin() + dim, static_cast<int64_t>(call.tensors.size()));
  factors.outputs.push_back(std::move(output));
  factors.partial.push_back(flow(kEveryInput, kAllOps));
  factors.leading_whole = dim > 0;
  return factors;
}

/// The operator needs whole rows along `dim` arguments; every other dim is a batch.
Factorization along_dim(const OpCall& call, std::string_view argument) {
  auto factors = first_input_factors(call);
  auto& input = factors.inputs[0];
  const auto ndim = static_cast<int64_t>(input.sizes.size());
  if (ndim > 0) input.factors[call.dim(argument, ndim, -1)] = kNoFactor;
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    if (call.tensors[i].sizes == input.sizes) factors.inputs[i] = input;
  }
  auto output = input;
  if (ndim > 0 && call.find("k")) output.sizes[call.dim(argument, ndim, -1)] = kUnknownSize;
  factors.outputs.resize(call.output_count(), output);
  return factors;
}

/// A dim that the operator halves, or doubles again.
Factorization gated(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& self = factors.inputs.back(); // glu: self; glu_backward: gradient, self
  self.factors.clear();
  const auto ndim = static_cast<int64_t>(self.sizes.size());
  const auto dim = call.dim("dim", ndim, -1);
  factors.factors.clear();
  for (const auto size : self.sizes) self.factors.push_back(factors.add_factor(size));
  self.factors[dim] = kNoFactor;
  auto output = self;
  if (call.tensors.size() == 1) {
    output.sizes[dim] = kUnknownSize;
  } else {
    factors.inputs[0].factors = self.factors;
  }
  factors.outputs.push_back(std::move(output));
  factors.leading_whole = dim > 0;
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
  output.factors.push_back(kNoFactor);
  output.sizes.push_back(kUnknownSize);
  factors.outputs.push_back(std::move(output));
  factors.leading_whole = dim > 0;
  return factors;
}

/// The last two dims are whole.
Factorization matrix(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& input = factors.inputs[0];
  const auto ndim = input.sizes.size();
  TORCH_CHECK(ndim >= 2, call.name, " needs at least 2 dims, not ", ndim);
  input.factors[ndim - 1] = input.factors[ndim - 2] = kNoFactor;
  factors.outputs.push_back(input);
  factors.partial.push_back(flow(1, kLinearOps));
  return factors;
}

/// The backward of a view that cut dims: `whole` dims of the output (and of the gradient, as far as it has them) are not split.
Factorization uncut(const OpCall& call, const std::vector<int64_t>& whole, bool dropped) {
  const auto sizes = call.integers("input_sizes");
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
  factors.outputs.push_back(std::move(output));
  factors.partial.push_back(flow(1, kLinearOps));
  factors.leading_whole = std::find(whole.begin(), whole.end(), 0) == whole.end();
  return factors;
}

void uncut_local(const LocalCall& call) {
  if (!call.outputs.empty()) call.arg(call.find("input_sizes")) = call.outputs[0].local_sizes;
  call.op.callBoxed(*call.stack);
}

Factorization unfold_backward(const OpCall& call) {
  const auto sizes = call.integers("input_sizes");
  if (sizes.empty()) return whole_factors(call);
  return uncut(call, {call.dim("dim", static_cast<int64_t>(sizes.size()))}, false);
}

Factorization slice_backward(const OpCall& call) {
  const auto ndim = static_cast<int64_t>(call.integers("input_sizes").size());
  return uncut(call, {call.dim("dim", ndim)}, false);
}

Factorization select_backward(const OpCall& call) {
  const auto ndim = static_cast<int64_t>(call.integers("input_sizes").size());
  return uncut(call, {call.dim("dim", ndim)}, true);
}

Factorization diagonal_backward(const OpCall& call) {
  const auto ndim = static_cast<int64_t>(call.integers("input_sizes").size());
  return uncut(call, {call.dim("dim1", ndim), call.dim("dim2", ndim)}, true);
}

/// flip, roll: the named dims are whole; all of them without names.
Factorization reordered(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& input = factors.inputs[0];
  const auto ndim = static_cast<int64_t>(input.sizes.size());
  const auto dims = call.integers("dims");
  if (dims.empty()) input.factors.assign(input.factors.size(), kNoFactor);
  for (const auto dim : dims) {
    TORCH_CHECK_INDEX(dim >= -ndim && dim < ndim, call.name, ": dimension ", dim, " is out of range for a tensor of ", ndim,
                      " dims");
    input.factors[dim < 0 ? dim + ndim : dim] = kNoFactor;
  }
  factors.outputs.push_back(input);
  factors.partial.push_back(flow(1, kAllOps));
  return factors;
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
  registry.add("cat", {.factorize = cat});
  registry.add("stack", {.factorize = stack});
  registry.add("cumsum cumprod sort sort.stable _safe_softmax logcumsumexp cummax cummin topk",
               {.factorize = [](const OpCall& call) { return along_dim(call, "dim"); }});
  registry.add("slice_backward", {.factorize = slice_backward, .local = uncut_local});
  registry.add("select_backward", {.factorize = select_backward, .local = uncut_local});
  registry.add("diagonal_backward", {.factorize = diagonal_backward, .local = uncut_local});
  registry.add("unfold_backward", {.factorize = unfold_backward, .local = uncut_local});
  registry.add("unfold", {.factorize = unfold, .view = true});
  registry.add("glu glu_backward", {.factorize = gated});
  registry.add("flip roll", {.factorize = reordered});
  registry.add("diag_embed", {.factorize = diag_embed});
  registry.add("tril triu", {.factorize = matrix});
}

} // namespace tessera::rules
