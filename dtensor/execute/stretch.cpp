#include <tessera/dtensor/execute/execute.h>

namespace tessera::internal::dispatch {

at::Tensor stretched(const at::Tensor& whole, const Stretch& stretch) {
  const auto& [sizes, merged, part] = stretch;
  const auto row = product(sizes, 1, merged + 1); // positions that one entry of dim 0 takes
  const bool empty = part.size == 0;
  const auto first = empty ? 0 : part.offset / row;
  const auto rows = empty ? 0 : (part.offset + part.size - 1) / row + 1 - first;
  const bool has_rows = whole.dim() == static_cast<int64_t>(sizes.size()) && whole.size(0) != 1;
  auto touched = sizes;
  touched[0] = rows;
  const auto expanded = (has_rows ? whole.narrow(0, first, rows) : whole).expand(touched);
  return expanded.flatten(0, merged).narrow(0, empty ? 0 : part.offset - first * row, part.size);
}

} // namespace tessera::internal::dispatch
