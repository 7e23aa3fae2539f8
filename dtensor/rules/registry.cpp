#include <tessera/dtensor/rules/registry.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>

#include <map>
#include <mutex>

#include <tessera/dtensor/rules/factors.h>

namespace tessera::internal::rules {

namespace {

struct UserRules {
  std::mutex mutex;
  std::map<std::string, Rule> by_name; // nodes stay where they are
  static UserRules& instance() {
    static auto* rules = new UserRules;
    return *rules;
  }
};

const Rule* find_user_rule(const std::string& name) {
  auto& rules = UserRules::instance();
  const std::lock_guard lock(rules.mutex);
  const auto found = rules.by_name.find(name);
  return found == rules.by_name.end() ? nullptr : &found->second;
}

} // namespace

bool add_user_rule(const std::string& name, Rule rule) {
  auto& rules = UserRules::instance();
  const std::lock_guard lock(rules.mutex);
  return rules.by_name.emplace(name, std::move(rule)).second;
}

Registry::Registry() : pointwise_(OnLocals(pointwise_factors)), whole_(OnLocals(whole_without_rule)) {
  register_pointwise(*this);
  register_foreach(*this);
  register_reductions(*this);
  register_matmul(*this);
  register_scaled_mm(*this);
  register_views(*this);
  register_cuts(*this);
  register_shapes(*this);
  register_factories(*this);
  register_random(*this);
  register_scalars(*this);
  register_embedding(*this);
  register_indexing(*this);
  register_linalg(*this);
  register_spatial(*this);
  register_normalization(*this);
  register_softmax(*this);
  register_losses(*this);
  register_attention(*this);
}

const Registry& Registry::instance() {
  static const Registry registry;
  return registry;
}

void Registry::add(std::string_view names, const Rule& rule) {
  for (const auto name : absl::StrSplit(absl::string_view(names.data(), names.size()), ' ', absl::SkipEmpty())) {
    const bool added = rules_.emplace(std::string(name), rule).second;
    TORCH_INTERNAL_ASSERT(added, "two rules for ", std::string(name));
  }
}

const Rule* Registry::find(const c10::OperatorHandle& op) const {
  const auto& name = op.operator_name();
  absl::string_view base = name.name;
  if (!absl::ConsumePrefix(&base, "aten::")) return find_user_rule(name.name);
  const bool dunder = absl::StartsWith(base, "__");
  if (!dunder && !op.hasTag(at::Tag::inplace_view)) absl::ConsumeSuffix(&base, "_");
  absl::string_view overload = name.overload_name;
  const auto own = rules_.find(absl::StrCat(base, ".", overload));
  if (own != rules_.end()) return &own->second;
  const auto shared = rules_.find(base);
  if (shared == rules_.end()) return nullptr;
  const bool has_out = absl::ConsumeSuffix(&overload, "_out"); // add.Scalar_out is not add.Tensor_out
  const auto allocating = has_out ? rules_.find(absl::StrCat(base, ".", overload)) : rules_.end();
  return allocating == rules_.end() ? &shared->second : &allocating->second;
}

} // namespace tessera::internal::rules
