#pragma once

// Internal: factorizations written as text.

#include <string>
#include <string_view>

#include <tessera/dtensor/rules/registry.h>
#include <tessera/dtensor/rules/rule.h>

namespace tessera::internal::rules {

/// Dims by letters: "nc~,o->no~". One term an argument that is a tensor or a list of tensors, and one a result (the last counts
/// for all that follow). A letter is a factor, shared by all that name it; '*' a dim that is whole; '~' any number of whole dims;
/// "..." any number of dims that are batched, aligned at the right. A dim of size 1 beside a larger one is whole, and so are
/// all of a letter that differ otherwise. A tensor whose number of dims does not fit its term makes all tensors whole. Results
/// whose sizes are not known take those of the local result where a dim is whole.
Factorization pattern_factors(const OpCall& call, std::string_view pattern, std::string_view summed = "");
/// How many of `arguments` have a term: tensors, and lists of them.
size_t count_tensors(c10::ArrayRef<c10::Argument> arguments);
/// The same for every call.
Factorize by_pattern(const std::string& pattern, const std::string& summed = "");

/// A table of operators and their patterns.
struct PatternLine {
  std::string_view names;
  std::string_view pattern;
  std::string_view summed{}; ///< letters: split, a result without them is Partial(sum)
};
void add_patterns(Registry& registry, c10::ArrayRef<PatternLine> lines);

} // namespace tessera::internal::rules
