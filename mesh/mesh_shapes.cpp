// Meshes that are made of others: slices, flattened and split dims, slices put together.

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/mesh_state.h>

namespace tessera {

using internal::DimLayout, internal::MeshDim, internal::name_list, internal::size_list;

DeviceMesh DeviceMesh::of_dims(const DeviceMesh& source, std::vector<MeshDim> dims, int64_t origin) {
  auto root = source.root().impl_;
  std::vector<DimLayout> layouts;
  for (const auto& dim : dims) layouts.push_back(dim.layout);
  auto ranks = root->ranks.select(origin, internal::join(layouts));
  const auto device = root->device;
  return DeviceMesh(std::make_shared<internal::MeshState>(device, std::move(ranks), std::move(dims), origin, std::move(root)));
}

DeviceMesh DeviceMesh::root() const { return impl().root ? DeviceMesh(impl().root) : *this; }

std::optional<int64_t> DeviceMesh::root_dim(int64_t dim) const {
  const auto& own = impl().dims[static_cast<size_t>(wrap_dim(dim))];
  const auto& dims = impl().root ? impl().root->dims : impl().dims;
  std::optional<int64_t> found; // dims of one rank all lie alike: the name tells them apart
  for (size_t each = dims.size(); each-- > 0;) {
    if (dims[each].layout != own.layout || dims[each].size != own.size) continue;
    if (dims[each].name == own.name) return static_cast<int64_t>(each);
    found = static_cast<int64_t>(each);
  }
  return found;
}

DeviceMesh DeviceMesh::operator[](const std::string& name) const { return (*this)[std::vector<std::string>{name}]; }

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& names) const {
  TORCH_CHECK(!names.empty(), "a sub-mesh of ", to_string(), " needs at least one dim name");
  std::vector<int64_t> dims;
  for (const auto& name : names) {
    const auto dim = dim_of(name);
    TORCH_CHECK(dims.empty() || dims.back() < dim, "the dims ", name_list(names), " of a sub-mesh must be in the order of ",
                to_string(), ", each once");
    dims.push_back(dim);
  }
  return slice(dims);
}

DeviceMesh DeviceMesh::operator[](std::initializer_list<const char*> names) const {
  return (*this)[std::vector<std::string>(names.begin(), names.end())];
}

DeviceMesh DeviceMesh::slice(const std::vector<int64_t>& dims) const {
  const auto& mesh = impl();
  const auto& coordinate = own_coordinate();
  TORCH_CHECK(!dims.empty(), "a sub-mesh of ", to_string(), " needs at least one dim");
  std::vector<MeshDim> kept;
  int64_t origin = mesh.origin; // this rank's place, with index 0 in the dims kept
  for (size_t dim = 0; dim < mesh.dims.size(); ++dim) origin += internal::distance(mesh.dims[dim].layout, coordinate[dim]);
  int64_t last = -1;
  for (const auto each : dims) {
    const int64_t dim = wrap_dim(each);
    TORCH_CHECK(last < dim, "the dims ", size_list(dims), " of a sub-mesh must be in the order of ", to_string(), ", each once");
    last = dim;
    kept.push_back(mesh.dims[static_cast<size_t>(dim)]);
    origin -= internal::distance(kept.back().layout, coordinate[static_cast<size_t>(dim)]);
  }
  return kept.size() == mesh.dims.size() ? *this : of_dims(*this, std::move(kept), origin);
}

DeviceMesh DeviceMesh::flatten(const std::string& name) const {
  const auto& mesh = impl();
  std::vector<DimLayout> layouts;
  for (const auto& dim : mesh.dims) layouts.push_back(dim.layout);
  auto flat_name = !name.empty() ? name : c10::Join("_", mesh.dim_names);
  if (ndim() == 1 && (mesh.dims[0].name == flat_name)) return *this;
  const auto& taken = root().dim_names();
  TORCH_CHECK(name.empty() || std::find(taken.begin(), taken.end(), name) == taken.end(), "flatten of ", to_string(),
              ": its root ", root().to_string(), " has a dim named \"", name, "\" already");
  const auto communicator = ndim() == 1 ? mesh.dims[0].communicator : nullptr;
  return of_dims(*this, {{size(), internal::join(layouts), std::move(flat_name), communicator}}, mesh.origin);
}

DeviceMesh DeviceMesh::unflatten(const std::string& dim, const std::vector<int64_t>& sizes,
                                 const std::vector<std::string>& names) const {
  return unflatten(dim_of(dim), sizes, names);
}

DeviceMesh DeviceMesh::unflatten(int64_t dim, const std::vector<int64_t>& sizes, const std::vector<std::string>& names) const {
  const auto index = static_cast<size_t>(wrap_dim(dim));
  auto dims = impl().dims;
  const auto split = dims[index];
  const auto check = [&](bool holds, const auto&... problem) {
    TORCH_CHECK(holds, "unflatten of dim ", index, split.name.empty() ? "" : " (\"" + split.name + "\")", " of ", to_string(),
                " into ", size_list(sizes), ": ", problem...);
  };
  int64_t product = 1;
  for (const auto size : sizes) {
    check(size >= 1, "a size is ", size, ", it must be at least 1");
    const bool overflows = __builtin_mul_overflow(product, size, &product);
    check(!overflows && product <= split.size, "these sizes hold more ranks than the dim's ", split.size);
  }
  check(!sizes.empty() && product == split.size, "these sizes hold ", product, " ranks, but the dim has ", split.size);
  check(names.size() == (dim_names().empty() ? 0 : sizes.size()), names.size(), " names for ", sizes.size(), " dims of a mesh ",
        dim_names().empty() ? "without names" : "with names");
  const auto layouts = internal::split(split.layout, sizes);
  check(layouts.has_value(), "its ranks lie in groups that these sizes would cut");
  std::vector<MeshDim> parts;
  for (size_t i = 0; i < sizes.size(); ++i)
    parts.push_back({sizes[i], (*layouts)[i], names.empty() ? "" : names[i], sizes.size() == 1 ? split.communicator : nullptr});
  dims.erase(dims.begin() + static_cast<int64_t>(index));
  dims.insert(dims.begin() + static_cast<int64_t>(index), parts.begin(), parts.end());
  auto result = of_dims(*this, std::move(dims), impl().origin);
  auto all_names = dim_names();
  if (!all_names.empty()) {
    all_names.erase(all_names.begin() + static_cast<int64_t>(index));
    all_names.insert(all_names.begin() + static_cast<int64_t>(index), names.begin(), names.end());
  }
  internal::check_mesh_names(result.shape(), all_names);
  return result;
}

DeviceMesh DeviceMesh::concatenate(const std::vector<DeviceMesh>& meshes) {
  TORCH_CHECK(!meshes.empty(), "concatenate: the list of meshes is empty");
  const auto& first = meshes[0];
  std::vector<MeshDim> dims;
  std::vector<DimLayout> layouts;
  std::vector<std::string> names;
  int64_t origin = 0; // this rank's place, with index 0 in all dims
  for (const auto& mesh : meshes) {
    const auto& coordinate = mesh.own_coordinate();
    TORCH_CHECK(mesh.impl().root_ranks() == first.impl().root_ranks() && mesh.device() == first.device(),
                "concatenate: ", first.to_string(), " and ", mesh.to_string(),
                " are slices of different meshes: ", first.root().to_string(), " and ", mesh.root().to_string());
    int64_t place = mesh.impl().origin;
    for (size_t dim = 0; dim < coordinate.size(); ++dim) {
      place += internal::distance(mesh.impl().dims[dim].layout, coordinate[dim]);
      origin -= internal::distance(mesh.impl().dims[dim].layout, coordinate[dim]);
      dims.push_back(mesh.impl().dims[dim]);
      layouts.push_back(dims.back().layout);
    }
    if (&mesh == &first) origin += place;
    names.insert(names.end(), mesh.dim_names().begin(), mesh.dim_names().end());
    TORCH_CHECK(!internal::overlap(layouts), "concatenate: ", mesh.to_string(), " overlaps ",
                &mesh == &first ? "itself" : "a mesh before it, such as " + first.to_string());
  }
  std::vector<int64_t> shape;
  for (const auto& dim : dims) shape.push_back(dim.size);
  internal::check_mesh_names(shape, names);
  return of_dims(first, std::move(dims), origin);
}

} // namespace tessera
