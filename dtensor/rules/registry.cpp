#include <tessera/dtensor/rules/registry.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>

#include <algorithm>
#include <map>
#include <mutex>

#include <tessera/dtensor/register_sharding.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/patterns.h>

namespace tessera::rules {

namespace {

/// Rules of operators that are not PyTorch's.
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

Registry::Registry() {
  register_pointwise(*this);
  register_foreach(*this);
  register_reductions(*this);
  register_matmul(*this);
  register_views(*this);
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
  pointwise_.factorize = pointwise_factors;
  whole_.factorize = whole_factors;
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

const Rule* Registry::find(const c10::OperatorName& name) const {
  absl::string_view base = name.name;
  if (!absl::ConsumePrefix(&base, "aten::")) return find_user_rule(name.name);
  if (absl::EndsWith(base, "_")) { // squeeze_, whose rule is not squeeze's
    if (const auto exact = rules_.find(base); exact != rules_.end()) return &exact->second;
  }
  const bool dunder = absl::StartsWith(base, "__");
  const bool in_place = !dunder && absl::ConsumeSuffix(&base, "_");
  auto found = rules_.find(absl::StrCat(base, ".", name.overload_name));
  if (found == rules_.end()) found = rules_.find(base);
  if (found == rules_.end() || (in_place && found->second.view)) return nullptr;
  return &found->second;
}

const c10::IValue* OpCall::find(std::string_view argument) const {
  const auto index = schema.argumentIndexWithName(argument);
  return index ? &args[static_cast<size_t>(*index)] : nullptr;
}

int64_t OpCall::integer(std::string_view argument, int64_t otherwise) const {
  const auto* value = find(argument);
  return value && value->isInt() ? value->toInt() : otherwise;
}

bool OpCall::flag(std::string_view argument, bool otherwise) const {
  const auto* value = find(argument);
  return value && value->isBool() ? value->toBool() : otherwise;
}

std::vector<int64_t> OpCall::integers(std::string_view argument) const {
  const auto* value = find(argument);
  if (!value || value->isNone()) return {};
  if (value->isInt()) return {value->toInt()};
  return value->toIntVector();
}

int64_t OpCall::dim(std::string_view argument, int64_t ndim, int64_t otherwise) const {
  const auto value = integer(argument, otherwise);
  const auto bound = std::max<int64_t>(ndim, 1);
  TORCH_CHECK_INDEX(value >= -bound && value < bound, name, ": dimension ", value, " is out of range for a tensor of ", ndim,
                    " dims");
  return value < 0 ? value + bound : value;
}

size_t OpCall::output_count() const {
  size_t count = 0;
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    count +=
        kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType; // of a list: the element that the rule describes
  }
  return count;
}

size_t LocalCall::begin() const { return stack->size() - op.schema().arguments().size(); }

int LocalCall::find(std::string_view argument) const {
  const auto index = op.schema().argumentIndexWithName(argument);
  return index ? *index : -1;
}

void LocalCall::finish(c10::IValue result) const {
  stack->resize(begin());
  stack->push_back(std::move(result));
}

} // namespace tessera::rules

namespace tessera {

namespace {

c10::OperatorHandle operator_named(const std::string& op) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name == op) return dispatcher.findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
  }
  TORCH_CHECK(false, "register_sharding: there is no operator ", op, "; define it before its rule");
}

size_t count_tensors(const std::vector<c10::Argument>& arguments) {
  return std::count_if(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    const auto& type = argument.type();
    return type->isSubtypeOf(*c10::OptionalType::ofTensor()) || type->isSubtypeOf(*c10::ListType::ofTensors()) ||
           type->isSubtypeOf(*c10::ListType::ofOptionalTensors());
  });
}

/// The operator exists, reaches Tessera's kernel, and has as many tensors as the pattern has terms.
void check_operator(const std::string& op, const std::string& pattern) {
  const auto handle = operator_named(op);
  TORCH_CHECK(!handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd), "register_sharding: ", op,
              " was defined with its function, which PyTorch runs on the DTensors themselves: no rule would be asked. Define the "
              "schema alone, and register the function for a backend with TORCH_LIBRARY_IMPL");
  const auto& schema = handle.schema();
  const auto arrow = static_cast<std::ptrdiff_t>(pattern.find("->"));
  const auto terms = [](auto begin, auto end) { return static_cast<size_t>(std::count(begin, end, ',')) + 1; };
  const auto inputs = terms(pattern.begin(), pattern.begin() + arrow), outputs = terms(pattern.begin() + arrow, pattern.end());
  TORCH_CHECK(inputs == count_tensors(schema.arguments()) && outputs == count_tensors(schema.returns()),
              "register_sharding: the pattern '", pattern, "' has ", inputs, " inputs and ", outputs, " results, but ", op,
              " has ", count_tensors(schema.arguments()), " tensor arguments and ", count_tensors(schema.returns()),
              " tensor results");
}

} // namespace

void register_sharding(const std::string& op, const std::string& pattern, const std::string& summed) {
  TORCH_CHECK(op.find("::") != std::string::npos && !absl::StartsWith(op, "aten::"), "register_sharding: '", op,
              "' is not the name of an operator outside aten, as \"my::attention\"");
  TORCH_CHECK(pattern.find("->") != std::string::npos, "register_sharding: the pattern '", pattern, "' of ", op, " has no '->'");
  constexpr std::string_view kSigns = "*~.,->";
  TORCH_CHECK(std::all_of(pattern.begin(), pattern.end(),
                          [&](char c) { return absl::ascii_isalpha(c) || kSigns.find(c) != std::string_view::npos; }),
              "register_sharding: the pattern '", pattern, "' of ", op, " may hold letters, '*', '~', '...', ',' and '->' only");
  for (const char letter : summed) {
    TORCH_CHECK(absl::ascii_isalpha(letter) && pattern.find(letter) != std::string::npos, "register_sharding: '", letter,
                "' is to be summed, but is no letter of the pattern '", pattern, "' of ", op);
  }
  check_operator(op, pattern);
  auto& rules = rules::UserRules::instance();
  const std::lock_guard lock(rules.mutex);
  const bool added = rules.by_name
                         .emplace(op, rules::Rule{.factorize =
                                                      [pattern, summed](const rules::OpCall& call) {
                                                        return rules::pattern_factors(call, pattern, summed);
                                                      }})
                         .second;
  TORCH_CHECK(added, "register_sharding: ", op, " has a rule already");
}

} // namespace tessera
