#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <tessera/checkpoint/load/load_names.h>
#include <tessera/checkpoint/load/load_plan.h>
#include <tessera/checkpoint/load/python_state.h>
#include <tessera/checkpoint/load/saved_names.h>
#include <tessera/dtensor/api.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <unordered_map>
#include <utility>

namespace tessera::internal {

namespace {

// As with exports, one of the names of a tied tensor suffices, and the others count for nothing.
std::vector<std::string> accepted_names(const NameFilter& filter, const StateDict::Entry& entry) {
  std::vector<std::string> names;
  if (accepts(filter, entry.name)) names.push_back(entry.name);
  std::ranges::copy_if(entry.aliases, std::back_inserter(names), [&](const auto& alias) { return accepts(filter, alias); });
  return names;
}

// Matches the entries of a state dict with what a checkpoint holds, by name or alias on either side.
class Matcher {
 public:
  Matcher(const Index& index, const SavedNames& names, const checkpoint::LoadOptions& options, int rank)
      : names_(names), options_(options) {
    for (const auto& tensor : index.tensors) {
      if (!tensor.copy.of.empty()) {
        if (tensor.copy.rank == rank) own_[tensor.copy.of] = &tensor;
        continue;
      }
      tensors_[tensor.name] = &tensor;
      for (const auto& alias : tensor.aliases) tensors_[alias] = &tensor;
    }
  }

  // The saved tensors that an entry takes its data from; more than one when tied names were saved apart.
  std::vector<const IndexedTensor*> tensors(const StateDict::Entry& entry) {
    std::vector<const IndexedTensor*> found;
    const auto look_up = [&](const std::string& name) {
      const auto there = names_.of_tensor(name);
      const auto saved = there ? tensors_.find(*there) : tensors_.end();
      if (saved == tensors_.end()) return;
      used_.insert(saved->second->name); // also for a name that is refused: what it would have taken is known
      if (!accepts(options_.filter, name)) return;
      const auto own = is_dtensor(std::get<at::Tensor>(entry.content)) ? own_.end() : own_.find(saved->second->name);
      const auto* tensor = own == own_.end() ? saved->second : own->second;
      if (std::find(found.begin(), found.end(), tensor) == found.end()) found.push_back(tensor);
    };
    look_up(entry.name);
    for (const auto& alias : entry.aliases) look_up(alias);
    return found;
  }

  const StateValue* value(const std::string& name) {
    const auto& values = names_.contents().values;
    const auto found = values.find(name);
    if (found == values.end()) return nullptr;
    used_.insert(names_.of_value(name));
    return &found->second;
  }

  std::vector<std::string> unused(const Index& index) const {
    std::vector<std::string> names;
    for (const auto& tensor : index.tensors) {
      if (tensor.copy.of.empty()) names.push_back(tensor.name);
    }
    for (const auto& [name, value] : index.values) names.push_back(name);
    std::erase_if(names, [&](const std::string& name) { return used_.count(name) || !accepts(options_.filter, name); });
    return names;
  }

 private:
  const SavedNames& names_;
  const checkpoint::LoadOptions& options_;
  std::unordered_map<std::string, const IndexedTensor*> tensors_;
  std::unordered_map<std::string, const IndexedTensor*> own_; // this rank's values of a tensor
  std::set<std::string> used_;
};

std::string describe(at::ScalarType dtype, at::IntArrayRef sizes) { return c10::str(c10::toString(dtype), sizes); }

void plan_tensor(const StateDict::Entry& entry, Matcher& matcher, const SavedNames& saved_names,
                 const checkpoint::LoadOptions& options, LoadPlan& plan) {
  const auto& tensor = std::get<at::Tensor>(entry.content);
  auto saved = matcher.tensors(entry);
  const auto names = accepted_names(options.filter, entry);
  if (names.empty()) return;
  if (saved.empty()) {
    plan.missing.push_back(names[0]);
    plan.looked_for.push_back(saved_names.of_tensor(names[0]).value_or(names[0]));
  }
  for (const auto* candidate : saved) {
    const auto dtype = tensor.scalar_type();
    const bool casts = c10::canCast(candidate->dtype, dtype), same_sizes = tensor.sizes() == at::IntArrayRef(candidate->sizes);
    const bool fits_dtype = candidate->dtype == dtype || (options.cast && casts);
    if (!fits_dtype || !same_sizes) {
      plan.could_cast = plan.could_cast || (casts && same_sizes);
      plan.mismatches.push_back(entry.name + ": saved as " + describe(candidate->dtype, candidate->sizes) +
                                ", to be loaded into " + describe(dtype, tensor.sizes()));
    }
  }
  if (!saved.empty()) plan.tensors.push_back({entry.name, tensor, std::move(saved), {}});
}

void plan_value(const StateDict::Entry& entry, Matcher& matcher, const SavedNames& saved_names,
                const checkpoint::LoadOptions& options, LoadPlan& plan) {
  const auto& wanted = std::get<StateValue>(entry.content);
  const auto* saved = matcher.value(entry.name);
  if (!accepts(options.filter, entry.name)) return;
  if (!saved) {
    plan.missing.push_back(entry.name);
    plan.looked_for.push_back(saved_names.of_value(entry.name));
    return;
  }
  std::optional<StateValue> value = *saved;
  if (options.python) value = convert_number(*saved, wanted);
  if (value && value->index() == wanted.index()) {
    plan.values.emplace_back(entry.name, std::move(*value));
  } else {
    plan.mismatches.push_back(entry.name + ": saved as " + to_text(to_json(*saved)) + ", a value of another type than " +
                              to_text(to_json(wanted)));
  }
}

LoadPlan plan_load(const StateDict& state, const Index& index, const SavedNames& names, const checkpoint::LoadOptions& options,
                   int rank) {
  LoadPlan plan;
  Matcher matcher(index, names, options, rank);
  for (const auto& entry : state.entries()) {
    if (entry.is_tensor()) {
      plan_tensor(entry, matcher, names, options, plan);
    } else {
      plan_value(entry, matcher, names, options, plan);
    }
  }
  plan.unused = matcher.unused(index);
  return plan;
}

// A quantized weight without its scale is another weight. The names are those of the models that DeepSeek and vLLM write.
void check_scaled(const LoadPlan& plan) {
  const std::set<std::string> unused(plan.unused.begin(), plan.unused.end());
  for (const auto& read : plan.tensors) {
    const auto& saved = *read.saved[0];
    if (!c10::isFloat8Type(saved.dtype) || read.tensor.scalar_type() == saved.dtype) continue;
    for (const auto* suffix : {"_scale_inv", "_scale"}) {
      TORCH_CHECK(unused.count(saved.name + suffix) == 0, "\"", read.name, "\" is ", c10::toString(saved.dtype),
                  " in the checkpoint, and a load does not multiply it by its scale \"", saved.name, suffix,
                  "\": read both with read_state_dict, and load the product. A LoadOptions::filter that refuses the name of the "
                  "scale loads the weight without it");
    }
  }
}

// Finds the bindings whose entries the filter (null: all) accepts.
std::vector<StateBinding*> bindings_of(const StateDict& state, const SavedState& saved, const NameFilter& filter) {
  std::vector<std::string> names;
  if (filter) {
    for (const auto& entry : state.entries()) names.push_back(entry.name);
    for (const auto& [name, tensor] : saved.tensors) names.push_back(name);
    for (const auto& [name, value] : saved.values) names.push_back(name);
  }
  std::vector<StateBinding*> bindings;
  for (const auto& binding : state.bindings()) {
    const auto prefix = binding->prefix();
    const std::string *accepted = nullptr, *refused = nullptr;
    for (const auto& name : names) {
      if (!prefix.empty() && name.starts_with(prefix)) (filter(name) ? accepted : refused) = &name;
    }
    TORCH_CHECK(!accepted || !refused, "LoadOptions::filter accepts \"", accepted ? *accepted : "", "\" and not \"",
                refused ? *refused : "", "\": of the names that begin with \"", prefix, "\" it must accept all or none");
    if (!refused) bindings.push_back(binding.get());
  }
  return bindings;
}

} // namespace

LoadPlan& LoadTarget::prepare(const Index& index, const checkpoint::LoadOptions& options, int rank) {
  const c10::InferenceMode no_inference(false); // the state that bindings make is trained with
  const c10::NoGradGuard no_grad;
  if (!target_.bindings().empty()) changed_ = target_;
  const SavedNames names(state(), index, options);
  bindings_ = bindings_of(state(), names.contents(), options.filter);
  for (auto* binding : bindings_) binding->before_load(state(), names.contents());
  plan_ = plan_load(state(), index, names, options, rank);
  check_scaled(plan_);
  return plan_;
}

void LoadTarget::add_settings(Agreement& agreement) const {
  for (const auto* binding : bindings_) {
    if (auto settings = binding->settings(); !settings.empty()) agreement.add_settings(binding->prefix(), std::move(settings));
  }
}

void LoadTarget::finish() {
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  for (const auto& [name, value] : plan_.values) state().set(name, value);
  for (auto* binding : bindings_) binding->after_load(state());
  if (changed_) target_ = *std::move(changed_);
}

void find_pieces(LoadPlan& plan) {
  for (auto& read : plan.tensors) read.pieces = pieces_of(read.name, read.tensor, Access::kWrite);
}

} // namespace tessera::internal
