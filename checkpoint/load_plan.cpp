#include <c10/util/Exception.h>
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

struct Findings {
  LoadPlan plan;
  std::vector<std::string> mismatches;
};

std::string describe(at::ScalarType dtype, at::IntArrayRef sizes) { return c10::str(c10::toString(dtype), sizes); }

void plan_tensor(const StateDict::Entry& entry, Matcher& matcher, const LoadOptions& options, Findings& findings) {
  const auto& tensor = std::get<at::Tensor>(entry.content);
  auto saved = matcher.tensors(entry);
  if (saved.empty()) findings.plan.missing.push_back(entry.name);
  for (const auto* candidate : saved) {
    const auto dtype = tensor.scalar_type();
    const bool fits_dtype = candidate->dtype == dtype || (options.cast && c10::canCast(candidate->dtype, dtype));
    if (!fits_dtype || tensor.sizes() != at::IntArrayRef(candidate->sizes)) {
      findings.mismatches.push_back(entry.name + ": saved as " + describe(candidate->dtype, candidate->sizes) +
                                    ", to be loaded into " + describe(dtype, tensor.sizes()));
    }
  }
  if (!saved.empty()) findings.plan.tensors.push_back({&entry, std::move(saved)});
}

void plan_value(const StateDict::Entry& entry, Matcher& matcher, Findings& findings) {
  const auto* saved = matcher.value(entry.name);
  if (!saved) {
    findings.plan.missing.push_back(entry.name);
  } else if (saved->index() != std::get<StateValue>(entry.content).index()) {
    findings.mismatches.push_back(entry.name + ": saved as " + to_json(*saved).dump() + ", a value of another type than " +
                                  to_json(std::get<StateValue>(entry.content)).dump());
  } else {
    findings.plan.values.emplace_back(entry.name, *saved);
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
  Findings findings;
  Matcher matcher(index, options);
  for (const auto& entry : state.entries()) {
    if (entry.is_tensor()) {
      plan_tensor(entry, matcher, options, findings);
    } else {
      plan_value(entry, matcher, findings);
    }
  }
  auto& [plan, mismatches] = findings;
  std::string problems;
  if (!plan.missing.empty() && !options.allow_missing) problems += "\nnot in the checkpoint:" + listing(plan.missing);
  if (!mismatches.empty()) problems += "\ndifferent in the checkpoint:" + listing(mismatches);
  TORCH_CHECK(problems.empty(), "the state does not fit the checkpoint:", problems);
  plan.unused = matcher.unused(index);
  return std::move(plan);
}

} // namespace tessera::checkpoint
