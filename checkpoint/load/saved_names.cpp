#include <tessera/checkpoint/load/load_names.h>
#include <tessera/checkpoint/load/saved_names.h>

#include <algorithm>
#include <utility>

namespace tessera::internal {

namespace {

template <typename Named>
bool holds_entries_of(const Named& named, const std::string& owner) {
  const auto prefix = owner + ".";
  const auto found = named.lower_bound(prefix);
  return found != named.end() && found->first.starts_with(prefix);
}

// The longest part of `name` that ends at a dot, or all of it, for which `find` returns something, and that.
template <typename Find>
auto find_owner(const std::string& name, const Find& find) {
  for (auto end = name.size(); end != std::string::npos && end > 0; end = name.rfind('.', end - 1)) {
    auto owner = name.substr(0, end);
    if (auto found = find(owner)) return std::pair(std::move(owner), std::move(found));
  }
  return std::pair(std::string(), decltype(find(name)){});
}

template <typename Map>
const typename Map::mapped_type* look_up(const Map& map, const std::string& key) {
  const auto found = map.find(key);
  return found == map.end() ? nullptr : &found->second;
}

bool is_list_of_parameters(const std::string& name, const std::string& prefix) {
  return name.starts_with(prefix) && (name.ends_with(".params") || name == prefix + "parameters");
}

// What the lists of parameters under a prefix name.
std::unordered_set<std::string> listed_parameters(const std::map<std::string, StateValue>& values, const std::string& prefix) {
  std::unordered_set<std::string> listed;
  for (auto item = values.lower_bound(prefix); item != values.end() && item->first.starts_with(prefix); ++item) {
    const auto* names = std::get_if<std::vector<std::string>>(&item->second);
    if (names && is_list_of_parameters(item->first, prefix)) listed.insert(names->begin(), names->end());
  }
  return listed;
}

} // namespace

SavedNames::SavedNames(const StateDict& state, const Index& index, const checkpoint::LoadOptions& options)
    : options_(options), contents_(index.contents()) {
  for (const auto& tensor : index.tensors) {
    if (!tensor.copy.of.empty()) continue;
    tensors_[tensor.name] = &tensor;
    for (const auto& alias : tensor.aliases) tensors_[alias] = &tensor;
  }
  for (const auto& binding : state.bindings()) add_binding(*binding, state);
  contents_ = contents_here();
}

void SavedNames::add_binding(const StateBinding& binding, const StateDict& state) {
  auto entries = binding.named_by_parameters();
  if (entries.prefixes.empty()) return;
  const auto groups =
      binding.prefix() + "param_groups."; // by group their options have numbers, which a parameter's name may be too
  if (contents_.values.count(groups + "0.params") > 0) std::erase(entries.prefixes, groups);
  lists_[binding.prefix()] = entries.prefixes.front();
  const auto listed = listed_parameters(contents_.values, binding.prefix());
  std::unordered_map<std::string, const Names*> aliases;
  for (const auto& entry : state.entries()) {
    if (!entry.aliases.empty()) aliases[entry.name] = &entry.aliases;
  }
  for (const auto& name : entries.parameters) {
    const auto* others = look_up(aliases, name);
    const auto there = parameter_there(name, others ? **others : Names(), entries, listed);
    parameters_[name] = there;
    for (const auto& prefix : entries.prefixes) {
      there_[prefix + name] = prefix + there;
      here_[prefix + there].push_back(prefix + name);
    }
  }
}

// The first of its names there of which there are entries.
std::string SavedNames::parameter_there(const std::string& name, const Names& aliases, const NamedByParameters& entries,
                                        const std::unordered_set<std::string>& listed) const {
  const auto names = candidates(name, aliases);
  const auto found = std::ranges::find_if(names, [&](const std::string& candidate) {
    return listed.count(candidate) > 0 || std::ranges::any_of(entries.prefixes, [&](const std::string& prefix) {
             return holds_entries_of(contents_.tensors, prefix + candidate) ||
                    holds_entries_of(contents_.values, prefix + candidate);
           });
  });
  return found == names.end() ? names.front() : *found;
}

SavedNames::Names SavedNames::candidates(const std::string& name, const Names& aliases) const {
  Names own{name}, names;
  own.insert(own.end(), aliases.begin(), aliases.end());
  for (const auto& each : own) names.push_back(saved_name(each, options_).value_or(each));
  for (size_t i = 0; i < own.size(); ++i) {
    const auto* tensor = look_up(tensors_, names[i]);
    if (!tensor) continue;
    names.push_back((*tensor)->name);
    names.insert(names.end(), (*tensor)->aliases.begin(), (*tensor)->aliases.end());
  }
  return names;
}

std::optional<std::string> SavedNames::of_tensor(const std::string& name) const {
  const auto there = following(name);
  return there ? there : saved_name(name, options_);
}

std::optional<std::string> SavedNames::following(const std::string& name) const {
  const auto [owner, there] = find_owner(name, [&](const std::string& each) { return look_up(there_, each); });
  if (!there) return std::nullopt;
  return *there + name.substr(owner.size());
}

// None for an entry of a parameter that only the checkpoint has, and whose name another parameter has here.
SavedNames::Names SavedNames::names_here(const std::string& saved) const {
  static const Names kNone;
  const auto [owner, owners] = find_owner(saved, [&](const std::string& each) {
    const auto* here = look_up(here_, each);
    return here || !look_up(there_, each) ? here : &kNone;
  });
  if (!owners) return {saved};
  Names names;
  for (const auto& each : *owners) names.push_back(each + saved.substr(owner.size()));
  return names;
}

// A name that several parameters here have there stands for all of them; not in the order of a state that is one vector.
StateValue SavedNames::value_here(const std::string& name, const StateValue& value) const {
  const auto* list = std::get_if<std::vector<std::string>>(&value);
  if (!list) return value;
  for (const auto& [root, prefix] : lists_) {
    if (!is_list_of_parameters(name, root)) continue;
    Names names;
    for (const auto& each : *list) {
      const auto* here = look_up(here_, prefix + each);
      if (!here || (here->size() > 1 && name == root + "parameters")) {
        names.push_back(each);
      } else {
        for (const auto& owner : *here) names.push_back(owner.substr(prefix.size()));
      }
    }
    return names;
  }
  return value;
}

SavedState SavedNames::contents_here() const {
  SavedState contents;
  for (const auto& [saved, tensor] : contents_.tensors) {
    for (const auto& name : names_here(saved)) contents.tensors.emplace(name, tensor);
  }
  for (const auto& [saved, value] : contents_.values) {
    for (const auto& name : names_here(saved)) contents.values.emplace(name, value_here(saved, value));
  }
  for (const auto& [name, there] : parameters_) {
    const auto* tensor = look_up(tensors_, there);
    contents.tensors.erase(name);
    if (tensor) contents.tensors.emplace(name, SavedState::Tensor{(*tensor)->dtype, (*tensor)->sizes});
  }
  return contents;
}

} // namespace tessera::internal
