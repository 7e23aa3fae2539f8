#pragma once

// Internal: agreement on what ranks gather together.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::checkpoint {

/// The names of the tensors that this rank is about to gather, in their order, by the ranks that take part.
class Gathers {
 public:
  void add(const std::vector<int64_t>& ranks, const std::string& name) { names_[ranks] += name + "\n"; }
  /// For the other ranks.
  std::string to_message() const;
  /// Ranks that gather together must gather the same names, or they would mix different tensors, or wait for each other.
  /// `messages` are those of all ranks; `step` is for the error.
  static void check_same(const std::vector<std::string>& messages, const std::string& step);

 private:
  std::map<std::vector<int64_t>, std::string> names_;
};

} // namespace tessera::checkpoint
