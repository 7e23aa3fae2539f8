#include <tessera/checkpoint/load_plan.h>

#include <algorithm>
#include <set>
#include <unordered_map>

namespace tessera::checkpoint {

namespace {

constexpr size_t kShownNames = 20;

// Matches the entries of a state dict with what a checkpoint holds, by name or alias on either side.
class Matcher {
 public:
  Matcher(const Index& index, const LoadOptions& options) : options_(options) {
    for (const auto& tensor : index.tensors) {
      tensors_[tensor.name] = &tensor;
      for (const auto& alias : tensor.aliases) tensors_[alias] = &tensor;
    }
    for (const auto& [name, value] : index.values) values_[name] = &value;
  }

  // The saved tensors that an entry takes its data from; more than one when tied names were saved apart.
  std::vector<const IndexedTensor*> tensors(const StateDict::Entry& entry) {
    std::vector<const IndexedTensor*> found;
    const auto look_up = [&](const std::string& name) {
      const auto saved = tensors_.find(options_.rename ? options_.rename(name) : name);
      if (saved == tensors_.end()) return;
      used_.insert(saved->second->name);
      if (std::find(found.begin(), found.end(), saved->second) == found.end()) found.push_back(saved->second);
    };
    look_up(entry.name);
    for (const auto& alias : entry.aliases) look_up(alias);
    return found;
  }

  const StateValue* value(const std::string& name) {
    const auto found = values_.find(name);
    if (found == values_.end()) return nullptr;
    used_.insert(name);
    return found->second;
  }

  std::vector<std::string> unused(const Index& index) const {
    std::vector<std::string> names;
    for (const auto& tensor : index.tensors) {
      if (!used_.count(tensor.name)) names.push_back(tensor.name);
    }
    for (const auto& [name, value] : index.values) {
      if (!used_.count(name)) names.push_back(name);
    }
    return names;
  }

 private:
  const LoadOptions& options_;
  std::unordered_map<std::string, const IndexedTensor*> tensors_;
  std::unordered_map<std::string, const StateValue*> values_;
  std::set<std::string> used_;
};

std::string describe(at::ScalarType dtype, at::IntArrayRef sizes) { return c10::str(c10::toString(dtype), sizes); }

void plan_tensor(const StateDict::Entry& entry, Matcher& matcher, const LoadOptions& options, LoadPlan& plan) {
  const auto& tensor = std::get<at::Tensor>(entry.content);
  auto saved = matcher.tensors(entry);
  if (saved.empty()) plan.missing.push_back(entry.name);
  for (const auto* candidate : saved) {
    const auto dtype = tensor.scalar_type();
    const bool fits_dtype = candidate->dtype == dtype || (options.cast && c10::canCast(candidate->dtype, dtype));
    if (!fits_dtype || tensor.sizes() != at::IntArrayRef(candidate->sizes)) {
      plan.mismatches.push_back(entry.name + ": saved as " + describe(candidate->dtype, candidate->sizes) +
                                ", to be loaded into " + describe(dtype, tensor.sizes()));
    }
  }
  if (!saved.empty()) plan.tensors.push_back({&entry, std::move(saved)});
}

void plan_value(const StateDict::Entry& entry, Matcher& matcher, LoadPlan& plan) {
  const auto* saved = matcher.value(entry.name);
  if (!saved) {
    plan.missing.push_back(entry.name);
  } else if (saved->index() != std::get<StateValue>(entry.content).index()) {
    plan.mismatches.push_back(entry.name + ": saved as " + to_json(*saved).dump() + ", a value of another type than " +
                              to_json(std::get<StateValue>(entry.content)).dump());
  } else {
    plan.values.emplace_back(entry.name, *saved);
  }
}

} // namespace

std::string listing(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kShownNames; ++i) text += "\n  " + names[i];
  if (names.size() > kShownNames) text += "\n  and " + std::to_string(names.size() - kShownNames) + " more";
  return text;
}

LoadPlan plan_load(const StateDict& state, const Index& index, const LoadOptions& options) {
  LoadPlan plan;
  Matcher matcher(index, options);
  for (const auto& entry : state.entries()) {
    if (entry.is_tensor()) {
      plan_tensor(entry, matcher, options, plan);
    } else {
      plan_value(entry, matcher, plan);
    }
  }
  plan.unused = matcher.unused(index);
  return plan;
}

} // namespace tessera::checkpoint
