#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/json.h>
#include <tessera/checkpoint/state_dict.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>

namespace tessera {

void StateDict::check_names(const Entry& entry) const {
  std::unordered_set<std::string_view> own;
  const auto check = [&](const std::string& name) {
    TORCH_CHECK(!name.empty(), "state dict: an empty name");
    TORCH_CHECK(name != "__metadata__", "state dict: the name \"__metadata__\" is reserved by the safetensors format");
    TORCH_CHECK(!contains(name) && own.insert(name).second, "state dict: the name \"", name, "\" is taken");
  };
  check(entry.name);
  for (const auto& alias : entry.aliases) check(alias);
}

void StateDict::append(Entry entry) {
  index_entry(entry, entries_.size());
  entries_.push_back(std::move(entry));
}

void StateDict::index_entry(const Entry& entry, size_t position) {
  index_[entry.name] = position;
  for (const auto& alias : entry.aliases) index_[alias] = position;
}

void StateDict::insert(Entry entry) {
  check_names(entry);
  append(std::move(entry));
}

void StateDict::add(const std::string& name, at::Tensor tensor, std::vector<std::string> aliases) {
  TORCH_CHECK(tensor.defined(), "state dict: tensor \"", name, "\" is undefined");
  insert({name, std::move(tensor), std::move(aliases)});
}

void StateDict::set(const std::string& name, StateValue value) {
  const auto found = index_.find(name);
  if (found == index_.end()) return insert({name, std::move(value), {}});
  auto& entry = entries_[found->second];
  TORCH_CHECK(!entry.is_tensor(), "state dict: \"", name, "\" is a tensor, not a value");
  entry.content = std::move(value);
}

void StateDict::add_submodule(const std::string& name) {
  if (std::ranges::find(submodules_, name) == submodules_.end()) submodules_.push_back(name);
}

const StateDict::Entry& StateDict::entry(const std::string& name) const {
  const auto found = index_.find(name);
  TORCH_CHECK(found != index_.end(), "state dict: no entry \"", name, "\"");
  return entries_[found->second];
}

const at::Tensor& StateDict::tensor(const std::string& name) const& {
  const auto& found = entry(name);
  TORCH_CHECK(found.is_tensor(), "state dict: \"", name, "\" is a value, not a tensor");
  return std::get<at::Tensor>(found.content);
}

const StateValue& StateDict::value(const std::string& name) const& {
  const auto& found = entry(name);
  TORCH_CHECK(!found.is_tensor(), "state dict: \"", name, "\" is a tensor, not a value");
  return std::get<StateValue>(found.content);
}

void StateDict::throw_wrong_type(const std::string& name) const {
  TORCH_CHECK(false, "state dict: value \"", name, "\" is of another type: it is ",
              internal::to_text(internal::to_json(value(name))));
}

void StateDict::erase(const std::string& name) {
  erase_if([own = entry(name).name](const Entry& each) { return each.name == own; }); // `name` may be an alias
}

void StateDict::erase_if(const std::function<bool(const Entry&)>& predicate) {
  if (std::erase_if(entries_, predicate) == 0) return;
  index_.clear();
  for (size_t position = 0; position < entries_.size(); ++position) index_entry(entries_[position], position);
}

namespace {

bool is_same_value(const StateDict::Entry& a, const StateDict::Entry& b) {
  return !a.is_tensor() && !b.is_tensor() && internal::is_same(std::get<StateValue>(a.content), std::get<StateValue>(b.content));
}

} // namespace

void StateDict::merge(const StateDict& other) {
  std::vector<const Entry*> added; // once all have been checked
  for (const auto& entry : other.entries_) {
    const auto found = index_.find(entry.name);
    const bool same_value = found != index_.end() && !entry.is_tensor() && is_same_value(entries_[found->second], entry);
    TORCH_CHECK(
        same_value || found == index_.end() || entry.name != "optimizer.type",
        "state dict: a merge of two classes of optimizers: give each a name, as state_dict(module, {{\"name\", optimizer}})");
    if (same_value) continue;
    check_names(entry);
    added.push_back(&entry);
  }
  for (const auto* entry : added) append(*entry);
  for (const auto& name : other.submodules_) add_submodule(name);
  bindings_.insert(bindings_.end(), other.bindings_.begin(), other.bindings_.end());
}

} // namespace tessera
