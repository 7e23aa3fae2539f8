#include <tessera/parallel/tensor/plan_lines.h>

#include <absl/algorithm/container.h>
#include <c10/util/Exception.h>
#include <fnmatch.h>

#include <algorithm>

#include <tessera/base/edit_distance.h>
#include <tessera/collectives/process_context.h>

namespace tessera::internal::parallel {

namespace {

void descend(torch::nn::Module& module, const std::string& path, std::vector<NamedModule>& all) {
  all.push_back({path, &module});
  for (const auto& child : module.named_children())
    descend(*child.value(), path.empty() ? child.key() : path + "." + child.key(), all);
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
  const auto nearest = absl::c_min_element(all, [&](const auto& a, const auto& b) {
    return edit_distance(line.modules, a.path) < edit_distance(line.modules, b.path);
  });
  TORCH_CHECK_VALUE(false, "parallelize (rank ", process_context().rank(), "): the plan names '", line.modules, "' (",
                    to_string(line.style), "), but no module has such a name; the nearest is '", nearest->path, "'");
}

} // namespace tessera::internal::parallel
