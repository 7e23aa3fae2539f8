#include <tessera/dtensor/placement.h>

#include <absl/hash/hash.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {

namespace {

template <typename... F>
struct Overloaded : F... {
  using F::operator()...;
};

template <typename... F>
Overloaded(F...) -> Overloaded<F...>; // Clang before 17 does not deduce it

const char* name(Partial::Op op) {
  switch (op) {
    case Partial::Op::kSum: return "sum";
    case Partial::Op::kAvg: return "avg";
    case Partial::Op::kMin: return "min";
    case Partial::Op::kMax: return "max";
    case Partial::Op::kProduct: return "product";
    case Partial::Op::kNorm: return "norm";
  }
  return "unknown";
}

} // namespace

bool shards_dim(const Placement& placement, int64_t dim) {
  if (const auto* shard = std::get_if<Shard>(&placement)) return shard->dim == dim;
  if (const auto* ragged = std::get_if<RaggedShard>(&placement)) return dim <= ragged->dim;
  return false;
}

size_t hash_value(const Placement& placement) {
  return std::visit(
      Overloaded{[](const Replicate&) { return absl::HashOf(0); }, [](const Shard& p) { return absl::HashOf(1, p.dim); },
                 [](const RaggedShard& p) { return absl::HashOf(2, p.dim, p.extents); },
                 [](const Partial& p) { return absl::HashOf(3, static_cast<int>(p.op), p.norm_p); }},
      placement);
}

std::string to_string(const Placement& placement) {
  return std::visit(
      Overloaded{[](const Replicate&) { return std::string("Replicate()"); },
                 [](const Shard& p) { return fmt::format("Shard({})", p.dim); },
                 [](const RaggedShard& p) { return fmt::format("RaggedShard({}, [{}])", p.dim, fmt::join(p.extents, ", ")); },
                 [](const Partial& p) {
                   return p.op == Partial::Op::kNorm ? fmt::format("Partial(norm {})", p.norm_p)
                                                     : fmt::format("Partial({})", name(p.op));
                 }},
      placement);
}

std::string to_string(const Placements& placements) {
  std::vector<std::string> parts;
  for (const auto& placement : placements) parts.push_back(to_string(placement));
  return fmt::format("({})", fmt::join(parts, ", "));
}

} // namespace tessera
