#include <tessera/mesh/mesh_state.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fmt/ranges.h>

#include <set>
#include <utility>

#include <tessera/collectives/process_context.h>

namespace tessera::internal {

MeshState::MeshState(at::Device of_rank, RankList all, std::vector<MeshDim> of_mesh, int64_t at_zero,
                     std::shared_ptr<const MeshState> made_of)
    : device(of_rank), ranks(std::move(all)), dims(std::move(of_mesh)), origin(at_zero), root(std::move(made_of)) {
  for (const auto& dim : dims) {
    shape.push_back(dim.size);
    if (!dim.name.empty()) dim_names.push_back(dim.name);
  }
  const auto index = ranks.index_of(process_context().rank());
  if (!index) return;
  coordinate = shape;
  int64_t rest = *index;
  for (size_t dim = shape.size(); dim-- > 0; rest /= shape[dim]) (*coordinate)[dim] = rest % shape[dim];
}

std::string name_list(const std::vector<std::string>& names) { return fmt::format("({:n})", names); }

std::string size_list(const std::vector<int64_t>& sizes) { return c10::str("[", c10::Join(", ", sizes), "]"); }

void check_mesh_names(const std::vector<int64_t>& shape, const std::vector<std::string>& names) {
  if (names.empty()) return;
  TORCH_CHECK(names.size() == shape.size(), "device mesh of shape ", size_list(shape), ": ", names.size(), " dim names ",
              name_list(names), " for ", shape.size(), " dims");
  std::set<std::string> seen;
  for (const auto& name : names) {
    TORCH_CHECK(!name.empty(), "device mesh: a dim name in ", name_list(names), " is empty");
    TORCH_CHECK(seen.insert(name).second, "device mesh: the dim name \"", name, "\" appears twice");
  }
}

} // namespace tessera::internal
