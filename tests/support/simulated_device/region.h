#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::testing::sim {

/// The bytes of a tensor.
class Region {
 public:
  Region(const char* begin, const char* end) : begin_(begin), end_(end) {}
  static Region of(const at::Tensor& tensor);

  const char* begin() const { return begin_; }
  const char* end() const { return end_; }
  bool is_empty() const { return begin_ == end_; }
  bool operator==(const Region& other) const = default;

  /// Whether they share a byte. Exact for strided tensors too: two columns of a matrix share none.
  bool overlaps(const Region& other) const;
  /// Whether all bytes of `other` are known to be in this one.
  bool covers(const Region& other) const;

 private:
  template <typename Visit>
  void for_each_element(const Visit& visit) const;

  const char* begin_;
  const char* end_;                           // after the last byte
  std::vector<int64_t> sizes_, byte_strides_; // none where every byte between the ends belongs to it
  int64_t element_size_ = 1;
};

} // namespace tessera::testing::sim
