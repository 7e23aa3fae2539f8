#include <tessera/dtensor/placement.h>

#include <absl/hash/hash.h>
#include <absl/strings/ascii.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>

namespace tessera {

namespace {

template <typename... F>
struct Overloaded : F... {
  using F::operator()...;
};

template <typename... F>
Overloaded(F...) -> Overloaded<F...>; // Clang before 17 does not deduce it

/// In the order of Partial::Op; the mask has a name of its own.
constexpr std::array<const char*, 6> kReductions{"sum", "avg", "min", "max", "product", "norm"};

constexpr std::array<std::string_view, 6> kNames{"Replicate", "Shard", "StridedShard", "RaggedShard", "Partial", "MaskPartial"};

/// Reads placements from the front of a text.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Placement placement() {
    const auto name = word();
    if (std::find(kNames.begin(), kNames.end(), name) == kNames.end())
      fail("Replicate, Shard, StridedShard, RaggedShard, Partial or MaskPartial");
    take(name);
    expect('(');
    Placement result;
    if (name == "Shard") {
      result = Shard{integer()};
    } else if (name == "StridedShard") {
      const auto dim = integer();
      expect(',');
      result = StridedShard{dim, integer()};
    } else if (name == "RaggedShard") {
      const auto dim = integer();
      expect(',');
      result = RaggedShard{dim, list<std::vector<int64_t>>('[', ']', [this] { return integer(); })};
    } else if (name == "Partial") {
      result = partial();
    } else if (name == "MaskPartial") {
      result = Partial{Partial::Op::kMask};
    }
    expect(')');
    return result;
  }

  Placements placements() {
    return list<Placements>('(', ')', [this] { return placement(); });
  }

  void finish() {
    skip_blanks();
    if (at_ < text_.size()) fail("the end");
  }

 private:
  void skip_blanks() {
    while (at_ < text_.size() && absl::ascii_isspace(text_[at_])) ++at_;
  }
  bool accept(char wanted) {
    skip_blanks();
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    if (!accept(wanted)) fail(std::string("'") + wanted + "'");
  }
  /// The word that comes next, which `take` passes over.
  std::string_view word() {
    skip_blanks();
    auto end = at_;
    while (end < text_.size() && absl::ascii_isalpha(text_[end])) ++end;
    return text_.substr(at_, end - at_);
  }
  void take(std::string_view word) { at_ += word.size(); }
  template <typename Number>
  Number number(const char* what) {
    skip_blanks();
    Number value{};
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc()) fail(what);
    at_ = end - text_.data();
    return value;
  }
  int64_t integer() { return number<int64_t>("an integer"); }

  template <typename List, typename Item>
  List list(char open, char close, const Item& item) {
    List result;
    expect(open);
    if (accept(close)) return result;
    do result.push_back(item());
    while (accept(','));
    expect(close);
    return result;
  }

  Partial partial() {
    const auto name = word();
    const auto found = std::find(kReductions.begin(), kReductions.end(), name);
    if (found == kReductions.end()) fail("sum, avg, min, max, product or norm");
    take(name);
    Partial result{static_cast<Partial::Op>(found - kReductions.begin())};
    if (result.op == Partial::Op::kNorm) result.norm_p = number<double>("the p of the norm");
    return result;
  }

  [[noreturn]] void fail(std::string_view wanted) const {
    TORCH_CHECK(false, "not a placement: '", text_, "': ", wanted, " is expected at position ", at_);
  }

  std::string_view text_;
  size_t at_ = 0;
};

} // namespace

bool shards_dim(const Placement& placement, int64_t dim) {
  if (const auto* shard = std::get_if<Shard>(&placement)) return shard->dim == dim;
  if (const auto* strided = std::get_if<StridedShard>(&placement)) return strided->dim == dim;
  if (const auto* ragged = std::get_if<RaggedShard>(&placement)) return dim <= ragged->dim;
  return false;
}

std::optional<int64_t> shared_dim(const Placement& a, const Placement& b) {
  const auto last = [](const Placement& placement) -> int64_t {
    if (const auto* shard = std::get_if<Shard>(&placement)) return shard->dim;
    if (const auto* strided = std::get_if<StridedShard>(&placement)) return strided->dim;
    if (const auto* ragged = std::get_if<RaggedShard>(&placement)) return ragged->dim;
    return -1;
  };
  for (int64_t d = 0; d <= std::min(last(a), last(b)); ++d) {
    if (shards_dim(a, d) && shards_dim(b, d)) return d;
  }
  return std::nullopt;
}

bool may_coexist(const Placement& outer, const Placement& inner) {
  if (is_partial(outer) && is_partial(inner)) return reduce_together(std::get<Partial>(outer), std::get<Partial>(inner));
  return !std::holds_alternative<RaggedShard>(outer) || !shared_dim(outer, inner);
}

bool reduce_together(const Partial& a, const Partial& b) { return a == b || same_value(a, b) || same_value(b, a); }

bool same_value(const Placement& from, const Placement& to) {
  return from == Placement(Partial{Partial::Op::kMask}) && to == Placement(Partial{});
}

Placements replicate_partial(Placements placements) {
  for (auto& placement : placements) {
    if (is_partial(placement)) placement = Replicate{};
  }
  return placements;
}

size_t hash_value(const Placement& placement) {
  return std::visit(
      Overloaded{[](const Replicate&) { return absl::HashOf(0); }, [](const Shard& p) { return absl::HashOf(1, p.dim); },
                 [](const RaggedShard& p) { return absl::HashOf(2, p.dim, p.extents); },
                 [](const Partial& p) { return absl::HashOf(3, static_cast<int>(p.op), p.norm_p); },
                 [](const StridedShard& p) { return absl::HashOf(4, p.dim, p.split_factor); }},
      placement);
}

std::string to_string(const Placement& placement) {
  return std::visit(
      Overloaded{[](const Replicate&) { return std::string("Replicate()"); },
                 [](const Shard& p) { return fmt::format("Shard({})", p.dim); },
                 [](const RaggedShard& p) { return fmt::format("RaggedShard({}, [{}])", p.dim, fmt::join(p.extents, ", ")); },
                 [](const Partial& p) {
                   if (p.op == Partial::Op::kMask) return std::string("MaskPartial()");
                   const auto* name = kReductions.at(static_cast<size_t>(p.op));
                   return p.op == Partial::Op::kNorm ? fmt::format("Partial({} {})", name, p.norm_p)
                                                     : fmt::format("Partial({})", name);
                 },
                 [](const StridedShard& p) { return fmt::format("StridedShard({}, {})", p.dim, p.split_factor); }},
      placement);
}

std::string to_string(const Placements& placements) {
  std::vector<std::string> parts;
  for (const auto& placement : placements) parts.push_back(to_string(placement));
  return fmt::format("({})", fmt::join(parts, ", "));
}

Placement parse_placement(std::string_view text) {
  Parser parser(text);
  auto result = parser.placement();
  parser.finish();
  return result;
}

Placements parse_placements(std::string_view text) {
  Parser parser(text);
  auto result = parser.placements();
  parser.finish();
  return result;
}

} // namespace tessera
