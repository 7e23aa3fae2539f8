#include <tessera/mesh/device_mesh.h>

#include <tessera/collectives/backends/backend.h>
#include <tessera/collectives/process_context.h>
#include <tessera/mesh/mesh_state.h>

#include <absl/hash/hash.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <set>

namespace tessera {

using internal::size_list, internal::name_list;

namespace {

// The largest number where the product is larger still.
int64_t product(const std::vector<int64_t>& shape) {
  int64_t result = 1;
  for (const auto size : shape)
    if (__builtin_mul_overflow(result, size, &result)) return std::numeric_limits<int64_t>::max();
  return result;
}

void check_shape(const std::vector<int64_t>& shape) {
  TORCH_CHECK(!shape.empty(), "device mesh: the shape is empty, it needs at least one dim");
  for (size_t dim = 0; dim < shape.size(); ++dim)
    TORCH_CHECK(shape[dim] >= 1, "device mesh of shape ", size_list(shape), ": dim ", dim, " has size ", shape[dim],
                ", it must be at least 1");
}

void check_ranks(const std::vector<int64_t>& shape, const RankList& ranks, int64_t world_size) {
  TORCH_CHECK(ranks.size() == product(shape), "device mesh of shape ", size_list(shape), " holds ", product(shape),
              " ranks, but ", ranks.size(), " are given: ", size_list(ranks.expanded()));
  const auto [lowest, highest] = ranks.range();
  if (lowest >= 0 && highest < world_size && !ranks.has_repetition()) return;
  std::set<int64_t> seen;
  for (const auto rank : ranks.expanded()) {
    TORCH_CHECK(rank >= 0 && rank < world_size, "device mesh: rank ", rank, " is not in the world of ", world_size, " ranks");
    TORCH_CHECK(seen.insert(rank).second, "device mesh: rank ", rank, " appears twice in ", size_list(ranks.expanded()));
  }
}

at::Device choose_device(at::DeviceType device_type) {
  const auto& context = process_context();
  if (device_type == at::kMeta && context.is_pretended()) return at::kMeta;
  try {
    return internal::backend_of(device_type).choose_device(context.local_rank());
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "device mesh on ", c10::DeviceTypeName(device_type, /*lower_case=*/true), ": rank ", context.rank(), ": ",
                error.what_without_backtrace());
  }
}

// The ranks as nested lists: [[0, 1], [2, 3]].
std::string nested(const std::vector<int64_t>& shape, const std::vector<int64_t>& ranks, size_t dim, int64_t& next) {
  if (dim == shape.size()) return std::to_string(ranks[next++]);
  std::vector<std::string> parts;
  for (int64_t i = 0; i < shape[dim]; ++i) parts.push_back(nested(shape, ranks, dim + 1, next));
  return c10::str("[", c10::Join(", ", parts), "]");
}

} // namespace

DeviceMesh make_device_mesh(at::DeviceType device_type, std::vector<int64_t> shape, RankList ranks,
                            std::vector<std::string> dim_names) {
  const auto& context = process_context();
  check_shape(shape);
  check_ranks(shape, ranks, context.world_size());
  internal::check_mesh_names(shape, dim_names);
  const auto device = choose_device(device_type);
  std::vector<internal::MeshDim> dims;
  int64_t stride = ranks.size();
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    stride /= shape[dim];
    dims.push_back({shape[dim], internal::join({{{shape[dim], stride}}}), dim_names.empty() ? "" : dim_names[dim], nullptr});
  }
  return DeviceMesh(std::make_shared<internal::MeshState>(device, std::move(ranks), std::move(dims), /*origin=*/0));
}

DeviceMesh init_device_mesh(at::DeviceType device_type, std::vector<int64_t> shape, std::vector<std::string> dim_names) {
  const auto world_size = process_context().world_size();
  check_shape(shape);
  TORCH_CHECK(product(shape) == world_size, "device mesh of shape ", size_list(shape), " holds ", product(shape),
              " ranks, but the world has ", world_size,
              product(shape) < world_size ? "; make_device_mesh takes some of them" : "");
  return make_device_mesh(device_type, std::move(shape), RankList::first(world_size), std::move(dim_names));
}

const internal::MeshState& DeviceMesh::impl() const {
  TORCH_CHECK(impl_, "the device mesh is undefined: it was default-constructed");
  return *impl_;
}

at::DeviceType DeviceMesh::device_type() const { return device().type(); }

at::Device DeviceMesh::device() const { return impl().device; }

int64_t DeviceMesh::ndim() const { return static_cast<int64_t>(impl().shape.size()); }

int64_t DeviceMesh::size() const { return impl().ranks.size(); }

int64_t DeviceMesh::size(int64_t dim) const { return impl().shape[wrap_dim(dim)]; }

const std::vector<int64_t>& DeviceMesh::shape() const { return impl().shape; }

const std::vector<std::string>& DeviceMesh::dim_names() const { return impl().dim_names; }

const std::vector<int64_t>& DeviceMesh::ranks() const { return impl().ranks.expanded(); }

const RankList& DeviceMesh::rank_list() const { return impl().ranks; }

const std::optional<std::vector<int64_t>>& DeviceMesh::coordinate() const { return impl().coordinate; }

int64_t DeviceMesh::wrap_dim(int64_t dim) const {
  TORCH_CHECK(dim >= -ndim() && dim < ndim(), to_string(), " has no dim ", dim, ", it has ", ndim(), " dims");
  return dim < 0 ? dim + ndim() : dim;
}

const std::vector<int64_t>& DeviceMesh::own_coordinate() const {
  TORCH_CHECK(coordinate(), "rank ", process_context().rank(), " is not in ", to_string());
  return *coordinate();
}

int64_t DeviceMesh::local_rank(int64_t dim) const {
  dim = wrap_dim(dim);
  return own_coordinate()[dim];
}

int64_t DeviceMesh::local_rank(const std::string& name) const { return local_rank(dim_of(name)); }

int64_t DeviceMesh::dim_of(const std::string& name) const {
  const auto& names = dim_names();
  const auto found = std::find(names.begin(), names.end(), name);
  TORCH_CHECK(found != names.end(), to_string(), " has no dim named \"", name, "\"");
  return found - names.begin();
}

CommunicatorPtr DeviceMesh::communicator(int64_t dim, const std::string& purpose) const {
  dim = wrap_dim(dim);
  own_coordinate();
  if (const auto& own = impl().dims[static_cast<size_t>(dim)].communicator) return own;
  return process_context().communicator(ndim() == 1 ? rank_list() : slice({dim}).rank_list(), device_type(), purpose);
}

std::string DeviceMesh::to_string() const {
  if (!defined()) return "DeviceMesh(undefined)";
  int64_t next = 0;
  const auto names = dim_names().empty() ? "" : ", names=" + name_list(dim_names());
  return c10::str("DeviceMesh(", c10::DeviceTypeName(device_type(), /*lower_case=*/true), ", ", nested(shape(), ranks(), 0, next),
                  names, ")");
}

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  if (a.impl_ == b.impl_) return true;
  if (!a.impl_ || !b.impl_) return false;
  const auto &mine = *a.impl_, &other = *b.impl_;
  return a.device_type() == b.device_type() && mine.dims == other.dims && mine.ranks == other.ranks &&
         mine.root_ranks() == other.root_ranks() && mine.coordinate == other.coordinate; // of ranks in threads each has its own
}

size_t DeviceMesh::hash() const {
  if (!defined()) return 0;
  return absl::HashOf(static_cast<int>(device_type()), shape(), rank_list(), dim_names());
}

} // namespace tessera
