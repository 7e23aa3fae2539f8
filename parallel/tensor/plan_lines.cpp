#include <tessera/parallel/tensor/plan_lines.h>

#include <absl/algorithm/container.h>
#include <c10/util/Exception.h>
#include <fnmatch.h>

#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>

#include <tessera/collectives/process_context.h>

namespace tessera::internal::parallel {

namespace {

void descend(torch::nn::Module& module, const std::string& path, std::vector<NamedModule>& all) {
  all.push_back({path, &module});
  for (const auto& child : module.named_children())
    descend(*child.value(), path.empty() ? child.key() : path + "." + child.key(), all);
}

/// How many characters have to be put in, taken out or replaced to make `b` of `a` (Levenshtein).
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    auto diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const auto replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

} // namespace

std::vector<NamedModule> modules_below(torch::nn::Module& top) {
  std::vector<NamedModule> all;
  descend(top, "", all);
  return all;
}

bool matches(std::string pattern, std::string path) {
  if (pattern.empty() || path.empty()) return pattern == path;
  for (auto* text : {&pattern, &path}) std::replace(text->begin(), text->end(), '.', '/');
  return fnmatch(pattern.c_str(), path.c_str(), FNM_PATHNAME) == 0;
}

std::vector<NamedModule> modules_of(const PlanLine& line, const std::vector<NamedModule>& all) {
  std::vector<NamedModule> found;
  absl::c_copy_if(all, std::back_inserter(found), [&](const auto& each) { return matches(line.modules, each.path); });
  if (!found.empty()) return found;
  const auto nearest = absl::c_min_element(
      all, [&](const auto& a, const auto& b) { return distance(line.modules, a.path) < distance(line.modules, b.path); });
  TORCH_CHECK_VALUE(false, "parallelize (rank ", process_context().rank(), "): the plan names '", line.modules, "' (",
                    to_string(line.style), "), but no module has such a name; the nearest is '", nearest->path, "'");
}

} // namespace tessera::internal::parallel
