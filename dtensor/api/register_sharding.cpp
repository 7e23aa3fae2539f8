#include <tessera/dtensor/register_sharding.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <absl/algorithm/container.h>
#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_split.h>

#include <algorithm>

#include <tessera/dtensor/rules/patterns.h>

namespace tessera::internal {

namespace {

c10::OperatorHandle operator_named(const std::string& op) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name == op) return dispatcher.findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
  }
  TORCH_CHECK(false, "register_sharding: there is no operator ", op, "; define it before its rule");
}

/// Letters, each once, and '*'; among them at most one '~' or "...".
bool is_term(absl::string_view term) {
  const auto dots = term.find("...");
  const auto middle = dots == absl::string_view::npos ? term.find('~') : dots;
  std::string dims(term);
  if (middle != absl::string_view::npos) dims.erase(middle, dots == absl::string_view::npos ? 1 : 3);
  return absl::c_all_of(dims, [&](char c) { return c == '*' || (absl::ascii_isalpha(c) && absl::c_count(dims, c) == 1); });
}

void check_terms(const std::string& op, const std::string& pattern) {
  const auto arrow = pattern.find("->");
  for (const auto& side : {pattern.substr(0, arrow), pattern.substr(arrow + 2)}) {
    for (const auto term : absl::StrSplit(side, ',')) {
      TORCH_CHECK(is_term(term), "register_sharding: the term '", std::string(term), "' of the pattern '", pattern, "' of ", op,
                  " must be letters, each once, and '*', with one '~' or one '...' among them at most");
    }
  }
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
  TORCH_CHECK(inputs == rules::count_tensors(schema.arguments()) && outputs == rules::count_tensors(schema.returns()),
              "register_sharding: the pattern '", pattern, "' has ", inputs, " inputs and ", outputs, " results, but ", op,
              " has ", rules::count_tensors(schema.arguments()), " tensor arguments and ", rules::count_tensors(schema.returns()),
              " tensor results");
}

} // namespace

} // namespace tessera::internal

namespace tessera {

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
  internal::check_terms(op, pattern);
  internal::check_operator(op, pattern);
  const bool added = internal::rules::add_user_rule(op, internal::rules::OnLocals(internal::rules::by_pattern(pattern, summed)));
  TORCH_CHECK(added, "register_sharding: ", op, " has a rule already");
}

} // namespace tessera
