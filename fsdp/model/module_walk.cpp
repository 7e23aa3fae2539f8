#include <tessera/fsdp/model/module_walk.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>

namespace tessera::internal {

using torch::nn::Module;

ModuleWalk::ModuleWalk(const std::vector<Module*>& tops) : tops_(tops.size()) {
  for (size_t top = 0; top < tops.size(); ++top) descend({tops[top], top, kNone, ""});
}

void ModuleWalk::descend(const Visit& visit) {
  const size_t position = visits_.size();
  if (!positions_.emplace(visit.module, position).second) return;
  check_script(*visit.module);
  visits_.push_back(visit);
  for (const auto& child : visit.module->named_children()) descend({child.value().get(), visit.top, position, child.key()});
}

bool ModuleWalk::is_below(const Module* module) const {
  const auto found = positions_.find(module);
  return found != positions_.end() && !visits_[found->second].is_top();
}

Place ModuleWalk::place_of(const Visit& visit) const {
  std::vector<std::string_view> keys;
  for (const auto* at = &visit; !at->is_top(); at = &visits_[at->above]) keys.push_back(at->key);
  return {visit.top, fmt::format("{}", fmt::join(keys.rbegin(), keys.rend(), "."))};
}

Place ModuleWalk::place_of(const Visit& visit, const std::string& key) const {
  auto place = place_of(visit);
  place.path += (place.path.empty() ? "" : ".") + key;
  return place;
}

std::string ModuleWalk::name(const Place& place) const {
  return tops_ > 1 ? std::to_string(place.top) + "." + place.path : place.path;
}

} // namespace tessera::internal
