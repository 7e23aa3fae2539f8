#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <utility>
#include <vector>

namespace tessera {

/// A number for each rank. Equal neighbours are kept once: the extents of a parameter over 65,536 ranks are a few runs.
class RankValues {
 public:
  /// `value` for the ranks up to `end`, from the end of the run before.
  struct Run {
    int64_t end = 0, value = 0;
    bool operator==(const Run&) const = default;
  };

  RankValues() = default;
  template <typename Iterator>
  RankValues(Iterator begin, Iterator end) {
    for (; begin != end; ++begin) push_back(*begin);
  }
  RankValues(const std::vector<int64_t>& values) : RankValues(values.begin(), values.end()) {}
  RankValues(std::initializer_list<int64_t> values) : RankValues(values.begin(), values.end()) {}

  void push_back(int64_t value) { append(1, value); }
  void append(int64_t ranks, int64_t value);

  size_t size() const { return static_cast<size_t>(runs_.empty() ? 0 : runs_.back().end); }
  bool empty() const { return runs_.empty(); }
  int64_t operator[](size_t rank) const { return runs_[run_of(rank)].value; }
  int64_t back() const { return runs_.back().value; }
  const std::vector<Run>& runs() const { return runs_; }
  /// The sum over the ranks before `rank`, or over all where it is their number.
  int64_t sum_before(size_t rank) const;
  int64_t largest() const; ///< 0 without ranks

  class const_iterator;
  using value_type = int64_t;
  const_iterator begin() const;
  const_iterator end() const;

  friend bool operator==(const RankValues&, const RankValues&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const RankValues& values) {
    for (const auto& run : values.runs_) h = H::combine(std::move(h), run.end, run.value);
    return H::combine(std::move(h), values.runs_.size());
  }

 private:
  size_t run_of(size_t rank) const;

  std::vector<Run> runs_; // neighbours differ, none is empty
};

class RankValues::const_iterator {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = int64_t;
  using difference_type = std::ptrdiff_t;
  using pointer = const int64_t*;
  using reference = const int64_t&;

  const_iterator() = default;
  const_iterator(const Run* run, int64_t rank) : run_(run), rank_(rank) {}
  reference operator*() const { return run_->value; }
  const_iterator& operator++() {
    if (++rank_ == run_->end) ++run_;
    return *this;
  }
  const_iterator operator++(int) { return std::exchange(*this, std::next(*this)); }
  friend bool operator==(const const_iterator& a, const const_iterator& b) { return a.rank_ == b.rank_; }

 private:
  const Run* run_ = nullptr;
  int64_t rank_ = 0;
};

inline RankValues::const_iterator RankValues::begin() const { return {runs_.data(), 0}; }
inline RankValues::const_iterator RankValues::end() const { return {nullptr, static_cast<int64_t>(size())}; }

} // namespace tessera
