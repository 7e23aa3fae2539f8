#include <tessera/plan/groups/structure.h>

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera::internal {

namespace {

using torch::nn::Module;

bool is_list(const Module& module) {
  const auto& name = module.name();
  return name == "torch::nn::ModuleListImpl" || name == "torch::nn::SequentialImpl" || name == "torch::nn::ModuleDictImpl";
}

bool has_parameters_below(const Module& module) { return !module.parameters().empty(); }

/// Whether some child has parameters.
bool is_composite(const Module& module) {
  const auto children = module.children();
  return std::any_of(children.begin(), children.end(), [](const auto& child) { return has_parameters_below(*child); });
}

/// The classes below a module, with the names, shapes and dtypes of their parameters: equal for blocks that repeat.
std::string signature_of(const Module& module) {
  auto text = module.name();
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    text += c10::str(" ", item.key(), item.value().sizes(), item.value().scalar_type());
  for (const auto& child : module.named_children()) text += c10::str(" {", child.key(), " ", signature_of(*child.value()), "}");
  return text;
}

class Splitter {
 public:
  Splitter(int64_t budget, int64_t item) : budget_(budget), item_(item) {}

  void split(const Module& module, const std::string& path) {
    const auto children = module.named_children();
    absl::flat_hash_map<std::string, int> alike;
    for (const auto& child : children) ++alike[signature_of(*child.value())];
    for (const auto& child : children) {
      if (!has_parameters_below(*child.value())) continue;
      const bool repeats = alike[signature_of(*child.value())] > 1;
      add(module, child.value(), path.empty() ? child.key() : path + "." + child.key(), repeats);
    }
  }
  std::vector<ModuleUnit> take() { return std::move(units_); }

 private:
  void add(const Module& parent, const std::shared_ptr<Module>& child, const std::string& path, bool repeats) {
    const bool composite = is_composite(*child);
    const bool is_block = composite && !is_list(*child) && (repeats || (is_list(parent) && !has_blocks(*child)));
    const auto bytes = new_bytes(*child);
    const bool is_too_large = budget_ > 0 && bytes > budget_;
    if (composite && (!is_block || is_too_large)) return split(*child, path);
    for (const auto& parameter : child->parameters()) seen_.insert(parameter.unsafeGetTensorImpl());
    if (bytes > 0) units_.push_back({{path}, {child}, bytes, is_block});
  }

  /// Whether blocks repeat somewhere below.
  static bool has_blocks(const Module& module) {
    absl::flat_hash_map<std::string, int> alike;
    for (const auto& child : module.children()) {
      if (is_composite(*child) && ++alike[signature_of(*child)] > 1) return true;
      if (has_blocks(*child)) return true;
    }
    return false;
  }

  /// Counts those of parameters that no unit has so far.
  int64_t new_bytes(const Module& module) const {
    int64_t bytes = 0;
    absl::flat_hash_set<const c10::TensorImpl*> here;
    for (const auto& parameter : module.parameters()) {
      const auto* const known = parameter.unsafeGetTensorImpl();
      if (seen_.contains(known) || !here.insert(known).second) continue;
      bytes +=
          parameter.numel() * (item_ > 0 && parameter.is_floating_point() ? item_ : static_cast<int64_t>(parameter.itemsize()));
    }
    return bytes;
  }

  int64_t budget_, item_;
  std::vector<ModuleUnit> units_;
  absl::flat_hash_set<const c10::TensorImpl*> seen_;
};

/// Small units one after another.
class Joiner {
 public:
  explicit Joiner(int64_t typical) : typical_(typical) {}

  void add(const ModuleUnit& unit) {
    const bool is_small = !unit.is_block && 2 * unit.bytes < typical_;
    if (!is_small || together_.bytes + unit.bytes > typical_) flush();
    if (!is_small) return groups_.push_back(unit);
    together_.bytes += unit.bytes;
    std::copy(unit.paths.begin(), unit.paths.end(), std::back_inserter(together_.paths));
    std::copy(unit.modules.begin(), unit.modules.end(), std::back_inserter(together_.modules));
  }
  std::vector<ModuleUnit> take() {
    flush();
    return std::move(groups_);
  }

 private:
  void flush() {
    constexpr int64_t kWorthAMessage = 4; // of the size of a block, the reciprocal
    if (kWorthAMessage * together_.bytes >= typical_ && together_.bytes > 0) groups_.push_back(together_);
    together_ = {};
  }

  int64_t typical_;
  ModuleUnit together_;
  std::vector<ModuleUnit> groups_;
};

} // namespace

std::vector<ModuleUnit> units_of(const Module& module, int64_t budget, int64_t item) {
  Splitter splitter(budget, item);
  splitter.split(module, "");
  return splitter.take();
}

std::vector<ModuleUnit> joined(const std::vector<ModuleUnit>& units, int64_t budget) {
  int64_t block = 0, any = 0;
  for (const auto& unit : units) {
    any = std::max(any, unit.bytes);
    if (unit.is_block) block = std::max(block, unit.bytes);
  }
  const auto largest = block > 0 ? block : any;
  Joiner joiner(budget > 0 ? std::min(budget, largest) : largest);
  for (const auto& unit : units) joiner.add(unit);
  return joiner.take();
}

} // namespace tessera::internal
