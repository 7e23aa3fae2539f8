#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checksum.h>
#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/pieces.h>
#include <tessera/checkpoint/ranks.h>
#include <tessera/checkpoint/reader.h>

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>

namespace tessera::checkpoint {

namespace {

constexpr size_t kShownNames = 20;

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (size_t i = 0; i < lines.size() && i < kShownNames; ++i) text += "\n  " + lines[i];
  if (lines.size() > kShownNames) text += "\n  and " + std::to_string(lines.size() - kShownNames) + " more";
  return text;
}

// Matches the entries of a state dict with what a checkpoint holds, by name or alias on either side.
class Matcher {
 public:
  explicit Matcher(const Index& index) {
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
      const auto saved = tensors_.find(name);
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
  std::unordered_map<std::string, const IndexedTensor*> tensors_;
  std::unordered_map<std::string, const StateValue*> values_;
  std::set<std::string> used_;
};

struct TensorRead {
  const StateDict::Entry* entry;
  std::vector<const IndexedTensor*> saved;
};

// What a load will do on this rank, and what stands against it.
struct LoadPlan {
  std::vector<TensorRead> tensors;
  std::vector<std::pair<std::string, StateValue>> values;
  std::vector<std::string> missing, unused, mismatches;
};

std::string describe(at::ScalarType dtype, at::IntArrayRef sizes) { return c10::str(c10::toString(dtype), sizes); }

void plan_tensor(const StateDict::Entry& entry, Matcher& matcher, LoadPlan& plan) {
  const auto& tensor = std::get<at::Tensor>(entry.content);
  auto saved = matcher.tensors(entry);
  if (saved.empty()) {
    plan.missing.push_back(entry.name);
    return;
  }
  for (const auto* candidate : saved) {
    if (candidate->dtype != tensor.scalar_type() || tensor.sizes() != at::IntArrayRef(candidate->sizes)) {
      plan.mismatches.push_back(entry.name + ": saved as " + describe(candidate->dtype, candidate->sizes) +
                                ", to be loaded into " + describe(tensor.scalar_type(), tensor.sizes()));
    }
  }
  plan.tensors.push_back({&entry, std::move(saved)});
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

LoadPlan plan_load(const StateDict& state, const Index& index) {
  LoadPlan plan;
  Matcher matcher(index);
  for (const auto& entry : state.entries()) (entry.is_tensor() ? plan_tensor : plan_value)(entry, matcher, plan);
  plan.unused = matcher.unused(index);
  return plan;
}

void check(const LoadPlan& plan, const LoadOptions& options) {
  std::string problems;
  if (!plan.missing.empty() && !options.allow_missing) problems += "\nnot in the checkpoint:" + join(plan.missing);
  if (!plan.mismatches.empty()) problems += "\ndifferent in the checkpoint:" + join(plan.mismatches);
  TORCH_CHECK(problems.empty(), "the state does not fit the checkpoint:", problems);
}

// Names that no rank uses.
std::vector<std::string> unused_everywhere(const std::vector<std::string>& messages) {
  std::vector<std::string> common;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    std::vector<std::string> names;
    const auto json = parse_json(messages[rank], "checkpoint: a rank's message");
    for (const auto& name : json["unused"]) names.push_back(name.get<std::string>());
    std::sort(names.begin(), names.end());
    if (rank == 0) {
      common = std::move(names);
      continue;
    }
    std::vector<std::string> both;
    std::set_intersection(common.begin(), common.end(), names.begin(), names.end(), std::back_inserter(both));
    common = std::move(both);
  }
  return common;
}

// Tensors that share memory here and were saved apart must be equal, or one of the saved ones would be lost silently.
void check_tied(const TensorRead& read, const std::vector<Piece>& pieces, Reader& reader) {
  for (size_t i = 1; i < read.saved.size(); ++i) {
    for (const auto& piece : pieces) {
      const Piece other{piece.box, at::empty_like(piece.data, at::MemoryFormat::Contiguous)};
      reader.read(*read.saved[i], other);
      TORCH_CHECK(at::equal(other.data, piece.data), "\"", read.entry->name, "\" is tied to \"", read.saved[i]->name,
                  "\", but the checkpoint holds different values for \"", read.saved[0]->name, "\" and \"", read.saved[i]->name,
                  "\"");
    }
  }
}

void read_tensors(const LoadPlan& plan, Reader& reader) {
  c10::NoGradGuard no_grad;
  for (const auto& read : plan.tensors) {
    const auto& tensor = std::get<at::Tensor>(read.entry->content);
    const auto pieces = pieces_of(read.entry->name, tensor);
    for (const auto& piece : pieces) reader.read(*read.saved[0], piece);
    mark_written(tensor);
    check_tied(read, pieces, reader);
  }
}

} // namespace

LoadReport load(StateDict& state, const std::filesystem::path& dir, const LoadOptions& options) {
  const Ranks ranks;
  const auto what = dir.string();
  std::optional<Index> index;
  LoadPlan plan;
  const auto messages = ranks.all("load " + what, [&] {
    index = read_index(dir);
    const auto saved = index->contents();
    for (const auto& binding : state.bindings()) binding->before_load(state, saved);
    plan = plan_load(state, *index);
    check(plan, options);
    return dump_json({{"unused", plan.unused}, {"index", to_hex(index->checksum)}}, "checkpoint");
  });
  ranks.all("load " + what, [&] {
    const auto first = parse_json(messages[0], what), mine = parse_json(messages[static_cast<size_t>(ranks.rank())], what);
    TORCH_CHECK(first["index"] == mine["index"], dir.string(), " is not the same checkpoint here as on rank 0");
    const auto unused = unused_everywhere(messages);
    TORCH_CHECK(options.allow_unused || unused.empty(),
                "the checkpoint holds more than the state (LoadOptions::allow_unused ignores it):", join(unused));
    Reader reader(dir, *index, options.verify);
    read_tensors(plan, reader);
    return std::string();
  });
  for (const auto& [name, value] : plan.values) state.set(name, value);
  for (const auto& binding : state.bindings()) binding->after_load(state);
  return {plan.missing, unused_everywhere(messages)};
}

LoadReport load(StateDict&& state, const std::filesystem::path& dir, const LoadOptions& options) {
  return load(state, dir, options);
}

} // namespace tessera::checkpoint
