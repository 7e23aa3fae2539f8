#include "lists.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <tessera/collectives/calls/combined_work.h>

#include <algorithm>
#include <utility>

#include "reduction.h"

namespace tessera::python {

namespace {

bool are_of_equal_size(const Tensors& parts) {
  return std::ranges::all_of(parts, [&](const auto& part) { return part.numel() == parts[0].numel(); });
}

} // namespace

const Tensors& parts_of(const std::vector<Tensors>& lists, const Communicator& group, const at::Tensor& own) {
  TORCH_CHECK_VALUE(lists.size() == 1, "one list of tensors is needed, not ", lists.size());
  const auto& list = lists[0];
  TORCH_CHECK_VALUE(static_cast<int>(list.size()) == group.size(), "a list of ", list.size(), " tensors for ", group.size(),
                    " ranks");
  for (size_t rank = 0; rank < list.size(); ++rank) {
    const bool has_size = static_cast<int>(rank) != group.rank() || list[rank].numel() == own.numel();
    TORCH_CHECK_VALUE(has_size && list[rank].scalar_type() == own.scalar_type(), "the tensor for rank ", rank, " has ",
                      list[rank].numel(), " elements of ", list[rank].scalar_type(), ", needed are ", own.numel(), " of ",
                      own.scalar_type());
  }
  return list;
}

std::vector<int64_t> sizes_of(const Tensors& tensors) {
  std::vector<int64_t> sizes;
  for (const auto& tensor : tensors) sizes.push_back(tensor.numel());
  return sizes;
}

Work all_gather_list(Communicator& group, Staging& staging, const Tensors& parts, const at::Tensor& input,
                     std::string_view label) {
  if (are_of_equal_size(parts)) return group.all_gather_into(staging.output(parts), Staging::input(input), label);
  std::vector<Work> works;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto& part = parts[static_cast<size_t>(rank)];
    if (rank != group.rank()) {
      works.push_back(group.broadcast(staging.output(part), rank, label));
      continue;
    }
    const auto own = Staging::input(input).clone(); // the input may lie in what the others send
    staging.copy_back(part, own.view(part.sizes()));
    works.push_back(group.broadcast(own, rank, label));
  }
  return internal::combine(std::move(works));
}

// Parts that differ in size are padded to the longest. Their sizes are part of the label, which the ranks compare.
Work reduce_scatter_list(Communicator& group, Staging& staging, const c10d::ReduceOp& op, const at::Tensor& output,
                         const Tensors& parts, std::string_view label) {
  const Reduction reduction(op);
  if (are_of_equal_size(parts)) return reduction.reduce_scatter(group, staging, output, Staging::input(parts), label);
  const auto sizes = sizes_of(parts);
  const auto longest = *std::ranges::max_element(sizes);
  const auto padded = at::zeros({group.size(), longest}, output.options());
  for (size_t rank = 0; rank < parts.size(); ++rank)
    padded[static_cast<int64_t>(rank)].narrow(0, 0, sizes[rank]).copy_(parts[rank].reshape(-1));
  const auto reduced = at::empty({longest}, output.options());
  staging.copy_back(output, reduced.narrow(0, 0, output.numel()).view(output.sizes()));
  return reduction.reduce_scatter(group, staging, reduced, padded, c10::str(label, " of ", c10::Join(", ", sizes)));
}

} // namespace tessera::python
