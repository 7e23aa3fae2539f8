#include <tessera/mesh/device_mesh.h>

#include <tessera/collectives/backend.h>
#include <tessera/collectives/process_context.h>

#include <absl/hash/hash.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <set>

namespace tessera {

struct DeviceMesh::Impl {
  at::Device device;
  std::vector<int64_t> shape;
  RankList ranks;
  std::vector<std::string> dim_names;
  std::optional<std::vector<int64_t>> coordinate;
};

namespace {

template <typename T>
std::string list(const std::vector<T>& values) {
  return c10::str("[", c10::Join(", ", values), "]");
}

std::string name_list(const std::vector<std::string>& names) { return fmt::format("({:n})", names); }

// The largest number where the product is larger still.
int64_t product(const std::vector<int64_t>& shape) {
  int64_t result = 1;
  for (const auto size : shape)
    if (__builtin_mul_overflow(result, size, &result)) return std::numeric_limits<int64_t>::max();
  return result;
}

std::vector<int64_t> strides_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * shape[dim];
  return strides;
}

std::optional<std::vector<int64_t>> find_coordinate(const std::vector<int64_t>& shape, const RankList& ranks, int64_t rank) {
  const auto index = ranks.index_of(rank);
  if (!index) return std::nullopt;
  const auto strides = strides_of(shape);
  std::vector<int64_t> coordinate;
  for (size_t dim = 0; dim < shape.size(); ++dim) coordinate.push_back(*index / strides[dim] % shape[dim]);
  return coordinate;
}

void check_shape(const std::vector<int64_t>& shape) {
  TORCH_CHECK(!shape.empty(), "device mesh: the shape is empty, it needs at least one dim");
  for (size_t dim = 0; dim < shape.size(); ++dim)
    TORCH_CHECK(shape[dim] >= 1, "device mesh of shape ", list(shape), ": dim ", dim, " has size ", shape[dim],
                ", it must be at least 1");
}

void check_ranks(const std::vector<int64_t>& shape, const RankList& ranks, int64_t world_size) {
  TORCH_CHECK(ranks.size() == product(shape), "device mesh of shape ", list(shape), " holds ", product(shape), " ranks, but ",
              ranks.size(), " are given: ", list(ranks.expanded()));
  const auto [lowest, highest] = ranks.range();
  if (lowest >= 0 && highest < world_size && !ranks.has_repetition()) return;
  std::set<int64_t> seen;
  for (const auto rank : ranks.expanded()) {
    TORCH_CHECK(rank >= 0 && rank < world_size, "device mesh: rank ", rank, " is not in the world of ", world_size, " ranks");
    TORCH_CHECK(seen.insert(rank).second, "device mesh: rank ", rank, " appears twice in ", list(ranks.expanded()));
  }
}

void check_names(const std::vector<int64_t>& shape, const std::vector<std::string>& names) {
  if (names.empty()) return;
  TORCH_CHECK(names.size() == shape.size(), "device mesh of shape ", list(shape), ": ", names.size(), " dim names ",
              name_list(names), " for ", shape.size(), " dims");
  std::set<std::string> seen;
  for (const auto& name : names) {
    TORCH_CHECK(!name.empty(), "device mesh: a dim name in ", name_list(names), " is empty");
    TORCH_CHECK(seen.insert(name).second, "device mesh: the dim name \"", name, "\" appears twice");
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
  return list(parts);
}

} // namespace

DeviceMesh make_device_mesh(at::DeviceType device_type, std::vector<int64_t> shape, RankList ranks,
                            std::vector<std::string> dim_names) {
  const auto& context = process_context();
  check_shape(shape);
  check_ranks(shape, ranks, context.world_size());
  check_names(shape, dim_names);
  const auto device = choose_device(device_type);
  auto coordinate = find_coordinate(shape, ranks, context.rank());
  return DeviceMesh({device, std::move(shape), std::move(ranks), std::move(dim_names), std::move(coordinate)});
}

DeviceMesh init_device_mesh(at::DeviceType device_type, std::vector<int64_t> shape, std::vector<std::string> dim_names) {
  const auto world_size = process_context().world_size();
  check_shape(shape);
  TORCH_CHECK(product(shape) == world_size, "device mesh of shape ", list(shape), " holds ", product(shape),
              " ranks, but the world has ", world_size,
              product(shape) < world_size ? "; make_device_mesh takes some of them" : "");
  return make_device_mesh(device_type, std::move(shape), RankList::first(world_size), std::move(dim_names));
}

DeviceMesh::DeviceMesh(Impl impl) : impl_(std::make_shared<const Impl>(std::move(impl))) {}

const DeviceMesh::Impl& DeviceMesh::impl() const {
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

DeviceMesh DeviceMesh::slice(const std::vector<int64_t>& dims) const {
  const auto& mesh = impl();
  const auto& coordinate = own_coordinate();
  const auto strides = strides_of(mesh.shape);
  int64_t origin = 0; // of the sub-mesh: this rank's place, with index 0 in the dims kept
  for (int64_t dim = 0; dim < ndim(); ++dim) origin += coordinate[dim] * strides[dim];
  for (const auto dim : dims) origin -= coordinate[dim] * strides[dim];

  Impl sub{mesh.device, {}, {}, {}, std::vector<int64_t>()};
  std::vector<RankList::Steps> steps;
  for (const auto dim : dims) {
    sub.shape.push_back(mesh.shape[dim]);
    if (!mesh.dim_names.empty()) sub.dim_names.push_back(mesh.dim_names[dim]);
    sub.coordinate->push_back(coordinate[dim]);
    steps.push_back({mesh.shape[dim], strides[dim]});
  }
  sub.ranks = mesh.ranks.select(origin, steps);
  return DeviceMesh(std::move(sub));
}

DeviceMesh DeviceMesh::flatten(const std::string& name) const {
  const auto& mesh = impl();
  Impl flat{mesh.device, {size()}, mesh.ranks, {}, std::nullopt};
  if (!name.empty())
    flat.dim_names = {name};
  else if (!mesh.dim_names.empty())
    flat.dim_names = {c10::Join("_", mesh.dim_names)};
  if (mesh.coordinate) flat.coordinate = find_coordinate(flat.shape, flat.ranks, process_context().rank());
  return DeviceMesh(std::move(flat));
}

CommunicatorPtr DeviceMesh::communicator(int64_t dim, const std::string& purpose) const {
  dim = wrap_dim(dim);
  own_coordinate();
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
  return a.device_type() == b.device_type() && a.shape() == b.shape() && a.rank_list() == b.rank_list() &&
         a.dim_names() == b.dim_names() && a.coordinate() == b.coordinate(); // of ranks in threads each has its own
}

size_t DeviceMesh::hash() const {
  if (!defined()) return 0;
  return absl::HashOf(static_cast<int>(device_type()), shape(), rank_list(), dim_names());
}

} // namespace tessera
