#include <c10/util/Exception.h>
#include <tessera/checkpoint/export/export_names.h>

#include <unordered_map>
#include <utility>

namespace tessera::internal {

bool filter_names(Holding& holding, const NameFilter& filter) {
  std::vector<std::string> names;
  if (filter(holding.name)) names.push_back(holding.name);
  for (const auto& alias : holding.aliases) {
    if (filter(alias)) names.push_back(alias);
  }
  if (names.empty()) return false;
  holding.name = names.front();
  holding.aliases.assign(names.begin() + 1, names.end());
  return true;
}

Snapshot filtered(Snapshot snapshot, const NameFilter& filter) {
  if (!filter) return snapshot;
  Snapshot kept;
  auto& [tensors, values] = snapshot.state;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!filter_names(tensors[i], filter)) continue;
    kept.state.tensors.push_back(std::move(tensors[i]));
    kept.data.push_back(std::move(snapshot.data[i]));
  }
  for (auto& value : values) {
    if (filter(value.first)) kept.state.values.push_back(std::move(value));
  }
  return kept;
}

SavePlan renamed(SavePlan plan, const NameMap& rename) {
  std::unordered_map<std::string, std::string> sources; // new name → old name
  const auto apply = [&](std::string& name) {
    const auto source = name;
    if (rename) name = rename(source);
    TORCH_CHECK(!name.empty(), "rename gives \"", source, "\" an empty name; `filter` leaves entries out");
    const auto [found, is_new] = sources.emplace(name, source);
    TORCH_CHECK(is_new, "rename maps \"", found->second, "\" and \"", source, "\" to the same name \"", name, "\"");
  };
  for (auto& [what, parts] : plan.tensors) {
    apply(what.name);
    for (auto& alias : what.aliases) apply(alias);
  }
  for (auto& [name, value] : plan.values) apply(name);
  return plan;
}

} // namespace tessera::internal
