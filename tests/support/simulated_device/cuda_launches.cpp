#include <tessera/tests/support/simulated_device/cuda_launches.h>

#include <ATen/ceil_div.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <set>
#include <vector>

namespace tessera::testing::sim {

namespace {

using Lists = std::vector<std::vector<at::Tensor>>;

bool are_alike(const at::Tensor& a, const at::Tensor& b) { return a.sizes() == b.sizes() && a.strides() == b.strides(); }

bool are_dense(const Lists& lists) {
  return std::all_of(lists.begin(), lists.end(), [](const auto& list) {
    return std::all_of(list.begin(), list.end(), [](const auto& tensor) { return tensor.is_non_overlapping_and_dense(); });
  });
}

/// The lists of one call, one below the other, have the same layouts, and each has one dtype.
bool are_regular(const Lists& lists) {
  const auto& first = lists[0];
  return are_dense(lists) && std::all_of(lists.begin(), lists.end(), [&](const auto& list) {
           return std::equal(list.begin(), list.end(), first.begin(), first.end(), are_alike) &&
                  std::all_of(list.begin(), list.end(), [&](const auto& each) { return each.dtype() == list[0].dtype(); });
         });
}

/// CUDA's kernel for lists of copies has no code for some types.
void check_copied(const Lists& lists) {
  static const std::set kUnknown{at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e8m0fnu, at::kFloat4_e2m1fn_x2};
  for (const auto& list : lists) {
    const auto dtype = list[0].scalar_type();
    TORCH_CHECK_NOT_IMPLEMENTED(!kUnknown.contains(dtype), "\"foreach_tensor_copy\" not implemented for '", dtype, "'");
  }
}

int64_t foreach_launches(const std::string& name, const Lists& lists) {
  constexpr std::array<int64_t, 5> kMostTensors{110, 64, 48, 36, 30}; // by the number of lists
  const auto count = static_cast<int64_t>(lists[0].size());
  const bool is_in_place = name.ends_with('_');
  if (!are_regular(lists)) return count;
  if (name == "aten::_foreach_copy_") check_copied(lists);
  const auto depth = std::min(lists.size() + (is_in_place ? 0 : 1), kMostTensors.size());
  return at::ceil_div(count, kMostTensors[depth - 1]);
}

} // namespace

int64_t cuda_launches(const std::string& name, const torch::jit::Stack& arguments) {
  Lists lists;
  for (const auto& argument : arguments) {
    if (argument.isTensorList() && !argument.toTensorList().empty()) lists.push_back(argument.toTensorVector());
  }
  if (lists.empty()) return 1;
  if (name.starts_with("aten::_foreach_")) return foreach_launches(name, lists);
  // A table that is copied to the device, and the kernel; or a copy a tensor.
  if (name != "aten::_chunk_cat" && name != "aten::split_with_sizes_copy") return 1;
  return are_dense(lists) ? 2 : static_cast<int64_t>(lists[0].size());
}

} // namespace tessera::testing::sim
