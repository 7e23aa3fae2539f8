// Answers questions of sharding_math.py. A line in: mesh shape | coordinate | tensor shape | one tensor dim a mesh dim, -1 for
// Replicate | one split factor a mesh dim, 1 for Shard. A line out: local shape | offsets.

#include <tessera/dtensor/layout/sharding_math.h>

#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::vector<int64_t> numbers(std::istream& in) {
  std::string field;
  std::getline(in, field, '|');
  std::istringstream text(field);
  std::vector<int64_t> result;
  for (int64_t value; text >> value;) result.push_back(value);
  return result;
}

void print(const std::vector<int64_t>& values) {
  for (const auto value : values) std::cout << value << ' ';
}

} // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream fields(line);
    const auto mesh = numbers(fields), coordinate = numbers(fields), sizes = numbers(fields), dims = numbers(fields),
               factors = numbers(fields);
    tessera::Placements placements;
    for (size_t m = 0; m < dims.size(); ++m) {
      placements.emplace_back(tessera::Replicate{});
      if (dims[m] >= 0) placements.back() = tessera::Shard{dims[m]};
      if (dims[m] >= 0 && factors[m] > 1) placements.back() = tessera::StridedShard{dims[m], factors[m]};
    }
    const auto box = tessera::internal::local_box(sizes, mesh, coordinate, placements);
    print(box.sizes);
    std::cout << "| ";
    print(box.offsets);
    std::cout << '\n';
  }
}
