#include "sparse.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <tessera/collectives/ranks/gather_texts.h>

#include <algorithm>
#include <vector>

namespace tessera::python {

namespace {

constexpr const char* kLabel = "ALLREDUCE_SPARSE";

/// The rows of all ranks, one rank's after another's.
at::Tensor gather_rows(Communicator& group, const at::Tensor& rows, const std::vector<int64_t>& counts) {
  const auto longest = *std::max_element(counts.begin(), counts.end());
  auto sizes = rows.sizes().vec();
  sizes[0] = longest;
  const auto padded = at::empty(sizes, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  sizes.insert(sizes.begin(), group.size());
  const auto all = at::empty(sizes, rows.options());
  group.all_gather_into(all, padded, kLabel).wait();
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group.size(); ++rank) parts.push_back(all[rank].narrow(0, 0, counts[static_cast<size_t>(rank)]));
  return at::cat(parts);
}

/// Otherwise their rows would not fit together.
void check_equal_shapes(Communicator& group, const at::Tensor& tensor) {
  const auto own = c10::str(tensor.scalar_type(), " of sizes ", tensor.sizes(), " with ", tensor.sparse_dim(), " sparse and ",
                            tensor.dense_dim(), " dense dims");
  const auto texts = internal::gather_texts_that_differ(own, group, at::kCPU, kLabel);
  TORCH_CHECK_VALUE(texts.empty(), internal::first_difference(texts, group.ranks(), "tensor"), ", they must be equal");
}

} // namespace

void add_up_sparse(Communicator& group, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_sparse(), "the tensor is not in COO format");
  check_equal_shapes(group, tensor);
  const auto own = tensor.coalesce();
  const auto count = at::full({1}, own._nnz(), at::kLong), counts = at::empty({group.size()}, at::kLong);
  group.all_gather_into(counts, count, kLabel).wait();
  const std::vector<int64_t> numbers(counts.data_ptr<int64_t>(), counts.data_ptr<int64_t>() + group.size());
  const auto indices = gather_rows(group, own.indices().t(), numbers);
  const auto values = gather_rows(group, own.values(), numbers);
  tensor.copy_(at::_sparse_coo_tensor_unsafe(indices.t(), values, tensor.sizes()).coalesce());
}

} // namespace tessera::python
