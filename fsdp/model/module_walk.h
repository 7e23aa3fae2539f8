#pragma once

// Internal: the modules below a module, without the strings and copies that Module's own lists make: with them, calls on nested
// modules would together take time quadratic and more in the depth.

#include <torch/nn/module.h>

#include <absl/container/flat_hash_map.h>

#include <algorithm>
#include <string>
#include <vector>

#include <tessera/fsdp/group/place.h>
#include <tessera/nn/follow_scripts.h>

namespace tessera::internal {

/// Module's registry of parameters itself; a module's children and buffers can only be copied, one module at a time.
struct Registry : torch::nn::Module {
  static const auto& parameters(const Module& module) { return module.*(&Registry::parameters_); }
};

/// Whether `predicate` holds for a parameter of `module` or below; asks in the order of `parameters()`, to the first such one. An
/// error for a ScriptModule whose script has another parameter now; those of a walk too.
template <typename Predicate> // bool(const at::Tensor&)
bool any_parameter(const torch::nn::Module& module, const Predicate& predicate) {
  check_script(module);
  for (const auto& item : Registry::parameters(module)) {
    if (item.value().defined() && predicate(item.value())) return true;
  }
  const auto children = module.children();
  return std::any_of(children.begin(), children.end(), [&](const auto& child) { return any_parameter(*child, predicate); });
}

/// All modules from `tops` downward, in the order of `named_modules`; one that is registered twice under its first name.
class ModuleWalk {
 public:
  static constexpr size_t kNone = static_cast<size_t>(-1); ///< above a top
  struct Visit {
    torch::nn::Module* module;
    size_t top;
    size_t above;    ///< position of the visit that led here
    std::string key; ///< under which it is registered there; empty of a top
    bool is_top() const { return above == kNone; }
  };
  explicit ModuleWalk(const std::vector<torch::nn::Module*>& tops);

  const std::vector<Visit>& visits() const { return visits_; }
  bool contains(const torch::nn::Module* module) const { return positions_.contains(module); }
  /// Whether the walk met `module` below a top.
  bool is_below(const torch::nn::Module* module) const;
  const Visit& visit_of(const torch::nn::Module* module) const { return visits_[positions_.at(module)]; }
  Place place_of(const Visit& visit) const;
  /// The place of what is registered as `key` in the module of a visit.
  Place place_of(const Visit& visit, const std::string& key) const;
  /// The name of that place, for errors: where there are several tops, with the number of its top in front.
  std::string name(const Place& place) const;

 private:
  void descend(const Visit& visit);

  size_t tops_;
  std::vector<Visit> visits_;
  absl::flat_hash_map<const torch::nn::Module*, size_t> positions_;
};

} // namespace tessera::internal
