#include <tessera/dtensor/spec.h>

#include <absl/algorithm/container.h>
#include <absl/container/flat_hash_map.h>
#include <absl/hash/hash.h>
#include <absl/strings/ascii.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>
#include <c10/util/strides.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>
#include <mutex>

#include <tessera/dtensor/layout/sharding_math.h>

namespace tessera::internal {

namespace {

std::string describe(const DeviceMesh& mesh, const Placements& placements, c10::IntArrayRef sizes) {
  return fmt::format("placements {} on a tensor of shape [{}] and {}", to_string(placements), fmt::join(sizes, ", "),
                     mesh.to_string());
}

void check_ragged(const DeviceMesh& mesh, const Placements& placements, c10::IntArrayRef sizes, size_t mesh_dim) {
  const auto& ragged = std::get<RaggedShard>(placements[mesh_dim]);
  TORCH_CHECK(ragged.dim >= 0 && ragged.dim < static_cast<int64_t>(sizes.size()), "RaggedShard dim ", ragged.dim,
              " is out of range: ", describe(mesh, placements, sizes));
  TORCH_CHECK(static_cast<int64_t>(ragged.extents.size()) == mesh.size(mesh_dim),
              "RaggedShard needs one extent a rank of mesh dim ", mesh_dim, ": ", describe(mesh, placements, sizes));
  int64_t total = 0;
  int64_t begin = 0;
  for (const auto& run : ragged.extents.runs()) {
    TORCH_CHECK(run.value >= 0, "RaggedShard extents must not be negative: ", describe(mesh, placements, sizes));
    int64_t sum = 0;
    TORCH_CHECK(!c10::mul_overflows(run.end - begin, run.value, &sum) && !c10::add_overflows(total, sum, &total),
                "RaggedShard extents add up to more than 64 bits count: ", describe(mesh, placements, sizes));
    begin = run.end;
  }
  const Placements outer(placements.begin(), placements.begin() + static_cast<int64_t>(mesh_dim));
  TORCH_CHECK(first_part_is_largest(outer, ragged.dim),
              "a RaggedShard of what a StridedShard split after another mesh dim: ", describe(mesh, placements, sizes));
  const auto expected = largest_positions(sizes, mesh.shape(), outer, ragged.dim);
  TORCH_CHECK(total == expected, "RaggedShard extents add up to ", total, ", not to ", expected, ": ",
              describe(mesh, placements, sizes));
}

void check_coexist(const DeviceMesh& mesh, const Placements& placements, c10::IntArrayRef sizes) {
  for (size_t i = 0; i < placements.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (may_coexist(placements[j], placements[i])) continue;
      const auto dim = shared_dim(placements[j], placements[i]);
      TORCH_CHECK(dim, "different Partial reductions do not mix: ", describe(mesh, placements, sizes));
      TORCH_CHECK(false, "tensor dim ", *dim,
                  " is split by a RaggedShard and by a later mesh dim: ", describe(mesh, placements, sizes));
    }
  }
}

void check_sizes(const DeviceMesh& mesh, const Placements& placements, c10::IntArrayRef sizes, at::ScalarType dtype) {
  for (const auto size : sizes) TORCH_CHECK(size >= 0, "sizes must not be negative: ", describe(mesh, placements, sizes));
  uint64_t numel = 0;
  TORCH_CHECK(!c10::safe_multiplies_u64(sizes, &numel) && numel <= std::numeric_limits<int64_t>::max(),
              "the tensor has more elements than 64 bits count: ", describe(mesh, placements, sizes));
  constexpr uint64_t kMostBytes = uint64_t{1} << 62; // the bytes of padded parts are counted as well
  TORCH_CHECK(numel <= kMostBytes / c10::elementSize(dtype), "a tensor of ", numel, " elements of ", dtype,
              " has more than 2^62 bytes: ", describe(mesh, placements, sizes));
}

/// Makes equal placements look equal, and checks that they fit.
void normalize(const DeviceMesh& mesh, Placements& placements, c10::IntArrayRef sizes, at::ScalarType dtype) {
  TORCH_CHECK(mesh.defined(), "a DTensor needs a mesh");
  TORCH_CHECK(static_cast<int64_t>(placements.size()) == mesh.ndim(),
              "one placement a mesh dim is needed: ", describe(mesh, placements, sizes));
  check_sizes(mesh, placements, sizes, dtype);
  const auto ndim = static_cast<int64_t>(sizes.size());
  for (size_t i = 0; i < placements.size(); ++i) {
    if (auto* shard = std::get_if<Shard>(&placements[i])) {
      TORCH_CHECK(shard->dim >= -ndim && shard->dim < ndim, "Shard dim ", shard->dim,
                  " is out of range: ", describe(mesh, placements, sizes));
      if (shard->dim < 0) shard->dim += ndim;
    } else if (auto* strided = std::get_if<StridedShard>(&placements[i])) {
      TORCH_CHECK(strided->dim >= -ndim && strided->dim < ndim, "StridedShard dim ", strided->dim,
                  " is out of range: ", describe(mesh, placements, sizes));
      TORCH_CHECK(
          strided->split_factor > 0 && strided->split_factor <= std::numeric_limits<int32_t>::max(),
          "the split factor of a StridedShard must be positive, and fit into 32 bits: ", describe(mesh, placements, sizes));
      if (strided->dim < 0) strided->dim += ndim;
      if (strided->split_factor == 1) placements[i] = Shard{strided->dim};
    } else if (auto* partial = std::get_if<Partial>(&placements[i])) {
      if (partial->op != Partial::Op::kNorm) partial->norm_p = 2.0;
      TORCH_CHECK(partial->norm_p > 0 && std::isfinite(partial->norm_p),
                  "the p of Partial(norm) must be positive and finite: ", describe(mesh, placements, sizes));
    }
  }
  check_coexist(mesh, placements, sizes);
  for (size_t i = 0; i < placements.size(); ++i) {
    if (std::holds_alternative<RaggedShard>(placements[i])) check_ragged(mesh, placements, sizes, i);
  }
}

} // namespace

} // namespace tessera::internal

namespace tessera {

/// All live specs, found by value. Never destroyed: specs may outlive static destruction.
class SpecPool {
 public:
  static SpecPool& instance() {
    static auto* pool = new SpecPool;
    return *pool;
  }

  SpecPtr intern(const DeviceMesh& mesh, Placements placements, std::vector<int64_t> sizes, at::ScalarType dtype,
                 std::vector<int64_t> strides) {
    const auto hash = value_hash(mesh, placements, sizes, dtype, strides);
    std::lock_guard lock(mutex_);
    auto& bucket = specs_[hash];
    for (const auto& [spec, weak] : bucket) { // a spec is only freed after `drop`, which needs the lock
      if (spec->dtype_ == dtype && spec->sizes_ == sizes && spec->strides_ == strides && spec->placements_ == placements &&
          spec->mesh_ == mesh) {
        if (auto alive = weak.lock()) return alive;
      }
    }
    auto* spec = new Spec;
    spec->mesh_ = mesh;
    auto box = internal::local_box(sizes, mesh, placements);
    spec->local_sizes_ = std::move(box.sizes);
    spec->local_offsets_ = std::move(box.offsets);
    spec->placements_ = std::move(placements);
    spec->numel_ = internal::product(sizes, 0, sizes.size());
    spec->sizes_ = std::move(sizes);
    spec->strides_ = std::move(strides);
    spec->dtype_ = dtype;
    spec->id_ = next_id_++;
    SpecPtr result(spec, [this, hash](const Spec* dead) {
      drop(hash, dead);
      delete dead;
    });
    bucket.push_back({spec, result});
    return result;
  }

 private:
  static size_t value_hash(const DeviceMesh& mesh, const Placements& placements, const std::vector<int64_t>& sizes,
                           at::ScalarType dtype, const std::vector<int64_t>& strides) {
    auto hash = absl::HashOf(mesh.hash(), sizes, strides, static_cast<int>(dtype));
    for (const auto& placement : placements) hash = absl::HashOf(hash, hash_value(placement));
    return hash;
  }

  struct Entry {
    const Spec* spec;
    std::weak_ptr<const Spec> weak;
  };

  void drop(size_t hash, const Spec* dead) {
    std::lock_guard lock(mutex_);
    const auto found = specs_.find(hash);
    if (found == specs_.end()) return;
    std::erase_if(found->second, [dead](const Entry& entry) { return entry.spec == dead; });
    if (found->second.empty()) specs_.erase(found);
  }

  std::mutex mutex_;
  uint64_t next_id_ = 1;
  absl::flat_hash_map<size_t, std::vector<Entry>> specs_;
};

std::vector<int64_t> contiguous_strides(c10::IntArrayRef sizes) {
  const auto strides = c10::contiguous_strides(sizes);
  return {strides.begin(), strides.end()};
}

SpecPtr Spec::intern(const DeviceMesh& mesh, Placements placements, std::vector<int64_t> sizes, at::ScalarType dtype,
                     std::vector<int64_t> strides) {
  internal::normalize(mesh, placements, sizes, dtype);
  if (strides.empty()) strides = contiguous_strides(sizes);
  TORCH_CHECK(strides.size() == sizes.size(), "the strides ", c10::IntArrayRef(strides),
              " do not fit: ", internal::describe(mesh, placements, sizes));
  return SpecPool::instance().intern(mesh, std::move(placements), std::move(sizes), dtype, std::move(strides));
}

SpecPtr Spec::with(Placements placements) const { return intern(mesh_, std::move(placements), sizes_, dtype_, strides_); }

bool Spec::is_replicated() const { return absl::c_all_of(placements_, is_replicate); }
bool Spec::has_partial() const { return absl::c_any_of(placements_, is_partial); }

const RaggedShard* Spec::ragged() const {
  for (const auto& placement : placements_) {
    if (const auto* ragged = std::get_if<RaggedShard>(&placement)) return ragged;
  }
  return nullptr;
}

std::string Spec::to_string() const {
  const auto dtype = absl::AsciiStrToLower(c10::toString(dtype_));
  return fmt::format("{}[{}] {} on {}", dtype, fmt::join(sizes_, ", "), tessera::to_string(placements_), mesh_.to_string());
}

} // namespace tessera
