#include <tessera/dtensor/rules/touched_rows.h>

#include <ATen/ops/full.h>

#include <tessera/dtensor/layout/sharding_math.h>

namespace tessera::internal::rules {

TouchedRows::TouchedRows(const Spec& spec) : spec_(spec), merged_(spec.ragged()->dim), part_(spec.local_sizes()[0]) {
  if (part_ == 0) return;
  const auto row = product(spec.sizes(), 1, merged_ + 1), offset = spec.local_offsets()[0];
  first_ = offset / row;
  count_ = (offset + part_ - 1) / row + 1 - first_;
  before_ = offset - first_ * row;
}

at::Tensor TouchedRows::completed(const at::Tensor& local, const at::Scalar& fill) const {
  std::vector<int64_t> sizes(spec_.sizes().begin(), spec_.sizes().begin() + merged_ + 1);
  sizes[0] = count_;
  auto flat = local.sizes().vec();
  flat[0] = product(sizes, 0, sizes.size());
  sizes.insert(sizes.end(), flat.begin() + 1, flat.end());
  if (flat[0] == part_) return local.reshape(sizes);
  const auto rows = at::full(flat, fill, local.options());
  rows.narrow(0, before_, part_).copy_(local);
  return rows.view(sizes);
}

at::Tensor TouchedRows::result(const at::Tensor& reduced, const OutputPlan& output, const at::Scalar& fill) const {
  const c10::IntArrayRef sizes(output.local_sizes);
  if (reduced.sizes() == sizes) return reduced;
  if (reduced.dim() != static_cast<int64_t>(sizes.size())) return reduced.flatten(0, merged_).narrow(0, before_, part_);
  auto whole = at::full(sizes, fill, reduced.options());
  whole.narrow(0, first_, count_).copy_(reduced);
  return whole;
}

} // namespace tessera::internal::rules
