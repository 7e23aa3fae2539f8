#include <algorithm>

#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/patterns.h>

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

/// The norms are over all dims but `dim`.
Factorization renorm(const OpCall& call) {
  auto factors = first_input_factors(call);
  auto& input = factors.inputs[0];
  const auto kept = call.dim("dim", static_cast<int64_t>(input.sizes.size()));
  for (int64_t d = 0; d < static_cast<int64_t>(input.factors.size()); ++d) {
    if (d != kept) input.factors[d] = kNoFactor;
  }
  factors.outputs.push_back(input);
  return factors;
}

} // namespace

void register_linalg(Registry& registry) {
  add_patterns(registry, kMatrices);
  registry.add("_fft_c2c _fft_r2c _fft_c2r", OnLocals(transform));
  registry.add("_linalg_solve_ex", OnLocals(solve));
  registry.add("linalg_cross", OnLocals(cross));
  registry.add("renorm", OnLocals(renorm));
}

} // namespace tessera::internal::rules
