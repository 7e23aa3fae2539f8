#pragma once

// Internal: small sets of known size, for what a rule says of several tensors, reductions or traits at once.

#include <c10/util/Exception.h>

#include <concepts>
#include <cstdint>
#include <initializer_list>

namespace tessera::internal::rules {

/// Positions among the tensors of a call, or among its results: below 64, or all from one on.
class IndexSet {
 public:
  constexpr IndexSet() = default;
  constexpr IndexSet(std::initializer_list<size_t> members) {
    for (const auto member : members) *this = with(member);
  }
  static constexpr IndexSet from(size_t first) {
    IndexSet set;
    set.bits_ = ~(bit(first) - 1);
    set.beyond_ = true;
    return set;
  }
  constexpr IndexSet with(size_t member) const {
    auto set = *this;
    set.bits_ |= bit(member);
    return set;
  }
  constexpr bool contains(size_t index) const { return index < kBits ? (bits_ >> index & 1) != 0 : beyond_; }
  constexpr bool operator==(const IndexSet&) const = default;

 private:
  static constexpr size_t kBits = 64;
  static constexpr uint64_t bit(size_t index) {
    TORCH_INTERNAL_ASSERT(index < kBits, "position ", index, " is too large for a set");
    return uint64_t{1} << index;
  }
  uint64_t bits_ = 0;
  bool beyond_ = false; ///< 64 and what follows
};
inline constexpr IndexSet kEveryInput = IndexSet::from(0);

/// Some of the values of `E`.
template <typename E>
class EnumSet {
 public:
  constexpr EnumSet(std::same_as<E> auto... members) : bits_((0u | ... | bit(members))) {}
  constexpr bool contains(E member) const { return (bits_ & bit(member)) != 0; }
  constexpr bool has_any(EnumSet others) const { return (bits_ & others.bits_) != 0; }
  constexpr EnumSet operator|(EnumSet other) const { return EnumSet(bits_ | other.bits_); }
  constexpr EnumSet operator&(EnumSet other) const { return EnumSet(bits_ & other.bits_); }

 private:
  constexpr explicit EnumSet(uint32_t bits) : bits_(bits) {}
  static constexpr uint32_t bit(E member) { return uint32_t{1} << static_cast<uint32_t>(member); }
  uint32_t bits_;
};

} // namespace tessera::internal::rules
