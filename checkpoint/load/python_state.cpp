#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/formats/reader.h>
#include <tessera/checkpoint/load/load_names.h>
#include <tessera/checkpoint/load/python_state.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string_view>
#include <unordered_map>

namespace tessera::internal {

namespace {

const std::string kRoot = "optimizer.";
const std::string kGroups = kRoot + "param_groups.";

// How Python computes, which has no counterpart here; the last one is the learning rate that a schedule began with.
constexpr std::array<std::string_view, 5> kPythonsOwn{"foreach", "fused", "capturable", "differentiable", "initial_lr"};

// What stands before the last dot of a name, and after it.
std::pair<std::string, std::string> split_last(const std::string& name) {
  const auto dot = name.rfind('.');
  return dot == std::string::npos ? std::pair(std::string(), name) : std::pair(name.substr(0, dot), name.substr(dot + 1));
}

// The name without the key that it begins with; nothing where it does not. Every name begins with the empty key.
std::optional<std::string> without(const std::string& key, const std::string& name) {
  if (key.empty()) return name;
  if (!name.starts_with(key + ".")) return std::nullopt;
  return name.substr(key.size() + 1);
}

class PythonNames {
 public:
  PythonNames(const checkpoint::PythonKeys& keys, const checkpoint::LoadOptions& options, const StateDict& state,
              const Index& index)
      : keys_(keys) {
    std::unordered_map<std::string, std::string> owners; // Python's name of a parameter → the first of ours
    const auto add = [&](const std::string& name, const std::string& owner) {
      const auto there = saved_name(name, options);
      if (!there) return;
      here_.emplace(*there, name);
      maps_two_on_one_ |= owners.emplace(*there, owner).first->second != owner;
      if (*there != name) renamed_.insert(name);
    };
    for (const auto& entry : state.entries()) {
      if (!options.rename || !entry.is_tensor() || entry.name.starts_with(kRoot)) continue;
      add(entry.name, entry.name);
      for (const auto& alias : entry.aliases) add(alias, entry.name);
    }
    const auto params = keys.optimizer + ".param_groups.0.params";
    flattened_ = std::ranges::none_of(index.values, [&](const auto& value) { return value.first == params; });
  }

  std::string parameter(const std::string& name) const {
    const auto found = here_.find(name);
    if (found != here_.end()) return found->second;
    return renamed_.count(name) > 0 && !maps_two_on_one_ ? name + " (of the checkpoint)"
                                                         : name; // another parameter has that name here
  }

  // The name there of any entry.
  std::string entry(const std::string& name) const {
    if (const auto rest = without(keys_.optimizer, name); rest && is_optimizers(*rest)) return kRoot + of_optimizer(*rest);
    const auto rest = without(keys_.model, name);
    return rest ? parameter(*rest) : name;
  }

 private:
  static bool is_optimizers(const std::string& name) { return name.starts_with("state.") || name.starts_with("param_groups."); }

  // "state.<parameter>.exp_avg", "param_groups.<parameter>.lr" or "param_groups.<number>.lr".
  std::string of_optimizer(const std::string& name) const {
    const auto [kind, rest] = std::pair(name.substr(0, name.find('.')), name.substr(name.find('.') + 1));
    const auto [owner, field] = split_last(rest);
    const bool is_numbered = kind == "param_groups" && !flattened_;
    return is_numbered || owner.empty() ? name : kind + "." + parameter(owner) + "." + field;
  }

  const checkpoint::PythonKeys& keys_;
  std::unordered_map<std::string, std::string> here_; // Python's name of a parameter → ours
  bool maps_two_on_one_ = false;                      // an error: the names then clash
  std::set<std::string> renamed_;                     // ours that differ from Python's
  bool flattened_ = false;
};

void check_names_differ(const Index& index) {
  std::set<std::string> names;
  const auto claim = [&](const std::string& name) {
    TORCH_CHECK(names.insert(name).second, "two entries of the Python checkpoint get the name \"", name, "\"");
  };
  for (const auto& tensor : index.tensors) claim(tensor.name);
  for (const auto& [name, value] : index.values) claim(name);
}

void name_parameters(StateValue& params, const std::string& name, const PythonNames& names) {
  const auto* numbers = std::get_if<std::vector<int64_t>>(&params);
  TORCH_CHECK(!numbers || numbers->empty(), name, " numbers the parameters: save what ",
              "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) returns, which names them");
  if (auto* list = std::get_if<std::vector<std::string>>(&params)) {
    for (auto& each : *list) each = names.parameter(each);
  }
}

// Options that change what a step does, and that LibTorch's optimizers lack.
void check_option(const std::string& name, const StateValue& value, const std::string& type) {
  const auto option = split_last(name).second;
  const auto* flag = std::get_if<bool>(&value);
  if (!flag) return;
  TORCH_CHECK(option != "maximize" || !*flag, name, " is set, and LibTorch's optimizers minimize");
  if (option != "decoupled_weight_decay") return;
  const bool is_other = (*flag && type == "Adam") || (!*flag && type == "AdamW");
  TORCH_CHECK(!is_other, name, " is ", *flag ? "true" : "false", ", so it is the state of ", *flag ? "AdamW" : "Adam",
              ", and here is ", type);
}

bool is_pythons_own(const std::string& name) {
  const auto option = split_last(name).second;
  return name.starts_with(kGroups) &&
         (std::ranges::count(kPythonsOwn, option) > 0 || option == "maximize" || option == "decoupled_weight_decay");
}

// Python keeps steps, and sometimes learning rates, as tensors of one number.
StateValue number_in(const IndexedTensor& tensor, Reader& reader) {
  const Piece piece{whole({}), at::empty({}, tensor.dtype)};
  reader.read(tensor, piece);
  if (c10::isFloatingType(tensor.dtype)) return piece.data.item<double>();
  if (tensor.dtype == at::kBool) return piece.data.item<bool>();
  return piece.data.item<int64_t>();
}

template <typename To, typename From>
std::optional<To> exact(From value) {
  if constexpr (std::is_same_v<To, int64_t>) {
    constexpr double kLimit = 9007199254740992; // 2^53: up to it a double counts in ones
    if (!(std::abs(value) <= kLimit) || std::trunc(value) != value) return std::nullopt;
  }
  const auto converted = static_cast<To>(value);
  if (static_cast<From>(converted) != value) return std::nullopt;
  return converted;
}

template <typename To, typename From>
std::optional<StateValue> exact_list(const std::vector<From>& values) {
  std::vector<To> converted;
  for (const auto value : values) {
    const auto one = exact<To>(value);
    if (!one) return std::nullopt;
    converted.push_back(*one);
  }
  return converted;
}

} // namespace

void take_names_from_python(Opened& opened, const checkpoint::PythonKeys& keys, const checkpoint::LoadOptions& options,
                            const StateDict& state) {
  auto& index = opened.index;
  const PythonNames names(keys, options, state, index);
  const auto type = state.contains(kRoot + "type") ? state.value<std::string>(kRoot + "type") : "";
  Reader reader(opened.source, index, index.has_checksums);
  for (auto& tensor : index.tensors) tensor.name = names.entry(tensor.name);
  for (auto& [name, value] : index.values) {
    name = names.entry(name);
    if (!name.starts_with(kGroups)) continue;
    if (name.ends_with(".params")) name_parameters(value, name, names);
    check_option(name, value, type);
  }
  std::erase_if(index.values, [](const auto& value) { return is_pythons_own(value.first); });
  std::erase_if(index.tensors, [](const auto& tensor) { return is_pythons_own(tensor.name); });
  check_names_differ(index);
  const auto is_optimizers = [](const auto& tensor) { return tensor.name.starts_with(kRoot); };
  const bool has_optimizer = std::ranges::any_of(index.tensors, is_optimizers) ||
                             std::ranges::any_of(index.values, [](const auto& value) { return value.first.starts_with(kRoot); });
  for (const auto& tensor : index.tensors) {
    if (is_optimizers(tensor) && tensor.sizes.empty() && !c10::isComplexType(tensor.dtype))
      index.values.emplace_back(tensor.name, number_in(tensor, reader));
  }
  // Python does not say which class it is.
  if (has_optimizer && !type.empty()) index.values.emplace_back(kRoot + "type", type);
}

std::optional<StateValue> convert_number(const StateValue& saved, const StateValue& wanted) {
  if (saved.index() == wanted.index()) return saved;
  const bool to_double = std::holds_alternative<double>(wanted), to_doubles = std::holds_alternative<std::vector<double>>(wanted);
  if (const auto* integer = std::get_if<int64_t>(&saved); integer && to_double) return exact<double>(*integer);
  if (const auto* number = std::get_if<double>(&saved); number && std::holds_alternative<int64_t>(wanted))
    return exact<int64_t>(*number);
  if (const auto* integers = std::get_if<std::vector<int64_t>>(&saved)) {
    if (to_doubles) return exact_list<double>(*integers);
    if (integers->empty() && std::holds_alternative<std::vector<std::string>>(wanted)) return std::vector<std::string>{};
  }
  if (const auto* numbers = std::get_if<std::vector<double>>(&saved);
      numbers && std::holds_alternative<std::vector<int64_t>>(wanted))
    return exact_list<int64_t>(*numbers);
  return std::nullopt;
}

} // namespace tessera::internal
