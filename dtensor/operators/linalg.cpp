#include <ATen/WrapDimUtils.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/patterns.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::rules {

namespace {

/// Decompositions and solvers work on whole matrices; everything before the matrix dims is a batch.
constexpr PatternLine kMatrices[] = {
    {"linalg_cholesky_ex linalg_inv_ex", "...**->...**,..."},
    {"cholesky cholesky_inverse linalg_matrix_exp", "...**->...**"},
    {"_linalg_svd", "...**->...**,...*,...**"},
    {"_linalg_eigh", "...**->...*,...**"},
    {"linalg_eig", "...**->...*,...**"},
    {"linalg_eigvals _linalg_eigvals", "...**->...*"},
    {"linalg_qr", "...**->...**,...**"},
    {"geqrf", "...**->...**,...*"},
    {"linalg_lu", "...**->...**,...**,...**"},
    {"linalg_lu_factor_ex", "...**->...**,...*,..."},
    {"linalg_ldl_factor_ex", "...**->...**,...*,..."},
    {"_linalg_det", "...**->...,...**,...*"},
    {"_linalg_slogdet", "...**->...,...,...**,...*"},
    {"linalg_solve_triangular _cholesky_solve_helper", "...**,...**->...**"},
    {"triangular_solve", "...**,...**->...**,...**"},
    {"linalg_lu_solve linalg_ldl_solve", "...**,...*,...**->...**"},
    {"linalg_householder_product", "...**,...*->...**"},
    {"ormqr", "...**,...*,...**->...**"},
    {"lu_unpack", "...**,...*->...**,...**,...**"},
    {"_cdist_forward", "...m*,...n*->...mn"},
    {"_euclidean_dist", "...m*,...n*->...mn"},
};

/// A transform needs the named dims whole.
Factorization transform(const OpCall& call) {
  Factorization factors;
  auto input = fresh_dims(factors, call.tensors[0].sizes);
  const auto named = call.named_dims("dim");
  for (auto& factor : factors.factors) factor.limit = SplitLimit::kNonEmpty;
  auto output = input;
  for (size_t d = 0; d < named.size(); ++d) {
    if (!named[d]) continue;
    input.factors[d] = output.factors[d] = kNoFactor;
    output.sizes[d] = call.outputs ? (*call.outputs)[0].sizes[d] : kUnknownSize;
  }
  factors.inputs.push_back(std::move(input));
  factors.add_output(std::move(output), kLinearOps);
  return factors;
}

/// A x = b, where b may be a vector, or a batch of vectors: then it has A's shape without the last dim.
Factorization solve(const OpCall& call) {
  const auto &a = call.tensors[0].sizes, &b = call.tensors[1].sizes;
  const bool vectors = b.size() == 1 || (b.size() + 1 == a.size() && std::equal(b.begin(), b.end(), a.begin()));
  return pattern_factors(call, vectors ? "...**,...*->...*,...**,...*,..." : "...**,...**->...**,...**,...*,...");
}

/// Three entries along `dim`, which is whole.
Factorization cross(const OpCall& call) {
  auto factors = pointwise_factors(call);
  const auto ndim = static_cast<int64_t>(factors.outputs[0].sizes.size());
  if (ndim == 0) return whole_factors(call); // an error of the operator
  const int whole = factors.outputs[0].factors[call.dim("dim", ndim, -1)];
  for (auto* tensors : {&factors.inputs[0], &factors.inputs[1], &factors.outputs[0]}) {
    for (auto& factor : tensors->factors) factor = factor == whole ? kNoFactor : factor;
  }
  factors.ragged = RaggedUse::kRows;
  return factors;
}

/// `tensor`, reduced between ranks where it is a Partial.
at::Tensor reduced(const at::Tensor& tensor, const std::string& label) {
  const auto& meta = *dtensor_meta(tensor);
  if (!meta.spec->has_partial()) return tensor;
  const auto spec = meta.spec->with(replicate_partial(meta.spec->placements()));
  return make_dtensor(redistribute_local(meta.local, *meta.spec, *spec, label), spec);
}

/// What brings the parts of `self` along `dim` to norms of at most `most`, as PyTorch's kernel computes it.
at::Tensor scale_to_norm(const at::Tensor& self, const at::Scalar& p, int64_t dim, const at::Scalar& most) {
  const auto ndim = self.dim();
  const auto kept = at::maybe_wrap_dim(dim, ndim);
  TORCH_CHECK(p.toDouble() > 0, "aten::renorm: the order of the norm must be positive, not ", p.toDouble());
  TORCH_CHECK(most.toDouble() >= 0, "aten::renorm: maxnorm must not be negative, as ", most.toDouble(), " is");
  TORCH_CHECK(ndim > 1, "aten::renorm: the tensor needs at least 2 dims, not ", ndim);
  std::vector<int64_t> others;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != kept) others.push_back(d);
  }
  const bool is_half = at::isReducedFloatingType(self.scalar_type());
  const auto dtype = is_half ? std::optional(at::kFloat) : std::nullopt;
  const auto norm = reduced(at::linalg_vector_norm(self, p, others, /*keepdim=*/true, dtype), "aten::renorm");
  const auto scale = at::where(norm.gt(most), norm.new_full({}, most).div(norm.add(1e-7)), at::Scalar(1.0));
  return is_half ? scale.to(self.scalar_type()) : scale;
}

/// Computes by operators that combine what the ranks hold of a row.
void renorm(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  const auto argument = [&](size_t i) -> const c10::IValue& { return (*stack)[begin + i]; };
  auto self = argument(0).toTensor();
  const auto scale = scale_to_norm(self, argument(1).toScalar(), argument(2).toInt(), argument(3).toScalar());
  const bool has_out = schema.arguments().back().is_out();
  auto result = has_out               ? stack->back().toTensor().copy_(self.mul(scale))
                : schema.is_mutable() ? self.mul_(scale)
                                      : self.mul(scale);
  stack->resize(begin);
  stack->emplace_back(std::move(result));
}

} // namespace

void register_linalg(Registry& registry) {
  add_patterns(registry, kMatrices);
  registry.add("_fft_c2c _fft_r2c _fft_c2r", OnLocals(transform));
  registry.add("_linalg_solve_ex", OnLocals(solve));
  registry.add("linalg_cross", OnLocals(cross));
  registry.add("renorm", Handler(renorm));
}

} // namespace tessera::internal::rules
