#include <tessera/dtensor/rules/factors.h>

#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <absl/strings/str_split.h>

#include <algorithm>
#include <array>
#include <numeric>

#include <tessera/dtensor/layout/sharding_math.h>

namespace tessera::internal::rules {

std::vector<int64_t> broadcast_sizes(const OpCall& call) {
  std::vector<int64_t> result;
  for (const auto& tensor : call.tensors) {
    if (!tensor.defined) continue;
    if (tensor.sizes.size() > result.size()) result.insert(result.begin(), tensor.sizes.size() - result.size(), 1);
    const auto shift = result.size() - tensor.sizes.size();
    for (size_t d = 0; d < tensor.sizes.size(); ++d) {
      auto& size = result[shift + d];
      TORCH_CHECK(size == tensor.sizes[d] || size == 1 || tensor.sizes[d] == 1, call.name, ": the shape ",
                  c10::IntArrayRef(tensor.sizes), " does not broadcast to the other arguments' ", c10::IntArrayRef(result));
      if (size == 1) size = tensor.sizes[d];
    }
  }
  return result;
}

TensorDims broadcast_dims(const std::vector<int64_t>& sizes, const TensorDims& whole) {
  TensorDims dims{{}, sizes};
  const auto shift = whole.sizes.size() - sizes.size();
  for (size_t d = 0; d < sizes.size(); ++d) {
    dims.factors.push_back(sizes[d] == whole.sizes[shift + d] ? whole.factors[shift + d] : kNoFactor);
  }
  return dims;
}

Factorization copy_factors(const OpCall& call) {
  auto factors = pointwise_factors(call);
  factors.partial.push_back(flow({0, 1}, kept_by_cast(call.tensors[1].dtype, call.tensors[0].dtype)));
  return factors;
}

TensorDims fresh_dims(Factorization& factors, const std::vector<int64_t>& sizes) {
  TensorDims dims;
  for (const auto size : sizes) dims.add(factors.add_factor(size), size);
  return dims;
}

TensorDims whole_dims(const std::vector<int64_t>& sizes) { return {absl::InlinedVector<int, 6>(sizes.size(), kNoFactor), sizes}; }

Factorization pointwise_factors(const OpCall& call) {
  Factorization factors;
  const auto whole = fresh_dims(factors, broadcast_sizes(call));
  for (const auto& tensor : call.tensors) {
    factors.inputs.push_back(tensor.defined ? broadcast_dims(tensor.sizes, whole) : TensorDims{});
  }
  factors.outputs.resize(call.output_count(), whole);
  factors.ragged = RaggedUse::kElementwise;
  // The result is laid out as TensorIterator does it.
  const auto full = std::find_if(call.tensors.begin(), call.tensors.end(),
                                 [&](const TensorArg& tensor) { return tensor.defined && tensor.sizes == whole.sizes; });
  if (full != call.tensors.end()) factors.strides = at::infer_dense_strides(full->sizes, full->spec->strides());
  return factors;
}

void run_in_format(const LocalCall& call) {
  if (call.arg(0).toTensor().dim() < call.inputs[0]->dim()) {
    auto* format = call.find("memory_format");
    if (format && format->isInt() && format->toMemoryFormat() != at::MemoryFormat::Preserve)
      *format = at::MemoryFormat::Contiguous;
  }
  call.op.callBoxed(*call.stack);
}

Factorize elementwise(absl::InlinedVector<PartialFlow, 2> flows) {
  return [flows = std::move(flows)](const OpCall& call) {
    auto factors = pointwise_factors(call);
    factors.partial = flows;
    return factors;
  };
}

Factorization first_input_factors(const OpCall& call) {
  Factorization factors;
  for (const auto& tensor : call.tensors) factors.inputs.push_back(whole_dims(tensor.sizes));
  factors.inputs[0] = fresh_dims(factors, call.tensors[0].sizes);
  return factors;
}

Factorization whole_factors(const OpCall& call) {
  Factorization factors;
  for (const auto& tensor : call.tensors) factors.inputs.push_back(whole_dims(tensor.sizes));
  if (call.outputs) {
    for (const auto& output : *call.outputs) factors.outputs.push_back(whole_dims(output.sizes));
  } else {
    factors.wrapping.shapes = Wrapping::kOfLocals;
  }
  return factors;
}

namespace {

/// Letters stand for factors.
class Letters {
 public:
  explicit Letters(Factorization& factors) : factors_(factors) { of_letter_.fill(kNoFactor); }

  /// The dims of a term; `sizes` is read where a letter comes for the first time.
  TensorDims dims_of(const std::string& term, const std::vector<int64_t>& sizes = {}) {
    TensorDims dims;
    for (size_t d = 0; d < term.size(); ++d) {
      auto& factor = of_letter_[static_cast<unsigned char>(term[d])];
      if (factor == kNoFactor) factor = factors_.add_factor(sizes[d]);
      dims.add(factor, factors_.factors[factor].size);
    }
    return dims;
  }

 private:
  Factorization& factors_;
  std::array<int, 128> of_letter_;
};

} // namespace

Factorization einsum_factors(const OpCall& call, std::string_view equation, IndexSet additive) {
  const std::vector<std::string> sides = absl::StrSplit(absl::string_view(equation.data(), equation.size()), "->");
  const std::vector<std::string> terms = absl::StrSplit(sides[0], ',');
  Factorization factors;
  factors.additive = additive;
  Letters letters(factors);
  factors.inputs.resize(call.tensors.size());
  for (size_t i = 0; i < terms.size(); ++i) {
    if (additive.contains(i)) continue;
    const auto& sizes = call.tensors[i].sizes;
    TORCH_CHECK(sizes.size() == terms[i].size(), call.name, ": argument ", i, " needs ", terms[i].size(), " dims, not shape ",
                c10::IntArrayRef(sizes));
    factors.inputs[i] = letters.dims_of(terms[i], sizes);
    TORCH_CHECK(factors.inputs[i].sizes == sizes, call.name, ": the shape ", c10::IntArrayRef(sizes), " of argument ", i,
                " does not fit the others (", std::string(equation), ")");
  }
  factors.outputs.push_back(letters.dims_of(sides[1]));
  for (size_t f = 0; f < factors.factors.size(); ++f) {
    const auto& out = factors.outputs[0].factors;
    if (std::find(out.begin(), out.end(), static_cast<int>(f)) == out.end()) factors.factors[f].reduction = Partial{};
  }
  for (size_t i = 0; i < terms.size(); ++i) {
    if (additive.contains(i)) {
      TORCH_CHECK(call.tensors[i].sizes.size() <= factors.outputs[0].sizes.size(), call.name, ": argument ", i,
                  " has too many dims");
      factors.inputs[i] = broadcast_dims(call.tensors[i].sizes, factors.outputs[0]);
    } else {
      factors.partial.push_back(flow(additive.with(i), kLinearOps));
    }
  }
  return factors;
}

bool any_sharded(const Placements& placements) { return std::any_of(placements.begin(), placements.end(), is_sharded); }

Placement from_extents(int64_t dim, const std::vector<int64_t>& extents) {
  const auto ranks = static_cast<int64_t>(extents.size());
  const auto size = std::accumulate(extents.begin(), extents.end(), int64_t{0});
  bool chunks = dim == 0;
  for (int64_t r = 0; r < ranks; ++r) chunks = chunks && extents[r] == chunk_extent(size, ranks, r).size;
  if (chunks) return Shard{0};
  return RaggedShard{dim, extents};
}

} // namespace tessera::internal::rules
