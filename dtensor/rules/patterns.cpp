#include <tessera/dtensor/rules/patterns.h>

#include <absl/strings/str_split.h>

#include <algorithm>
#include <array>

#include <tessera/dtensor/rules/factors.h>

namespace tessera::internal::rules {

namespace {

/// One term taken apart: what stands before and after its variable part, and what that is.
struct Term {
  absl::string_view before, after;
  enum class Middle { kNone, kBatch, kWhole } middle = Middle::kNone;
};

Term parse(absl::string_view text) {
  const auto dots = text.find("..."), tilde = text.find('~');
  if (dots != absl::string_view::npos) return {text.substr(0, dots), text.substr(dots + 3), Term::Middle::kBatch};
  if (tilde != absl::string_view::npos) return {text.substr(0, tilde), text.substr(tilde + 1), Term::Middle::kWhole};
  return {text, {}, Term::Middle::kNone};
}

std::vector<Term> parse_list(absl::string_view text) {
  std::vector<Term> terms;
  for (const auto part : absl::StrSplit(text, ',')) terms.push_back(parse(part));
  return terms;
}

/// Gives dims their factors.
class Pattern {
 public:
  Pattern(const OpCall& call, std::string_view pattern) : call_(call) {
    const std::vector<absl::string_view> sides = absl::StrSplit(absl::string_view(pattern.data(), pattern.size()), "->");
    inputs_ = parse_list(sides[0]);
    outputs_ = parse_list(sides[1]);
    of_letter_.fill(kNoFactor);
  }

  std::optional<Factorization> run(std::string_view summed) {
    if (!place_inputs() || !place_outputs()) return std::nullopt;
    for (const auto letter : summed) {
      const int factor = of_letter_[static_cast<unsigned char>(letter)];
      if (factor != kNoFactor) factors_.factors[factor].reduction = Partial{};
    }
    for (auto& factor : factors_.factors) factor.limit = SplitLimit::kNonEmpty;
    return std::move(factors_);
  }

 private:
  const Term& term_of(const TensorArg& tensor) {
    const auto before = c10::ArrayRef<c10::Argument>(call_.schema.arguments()).slice(0, tensor.argument);
    return inputs_[std::min(count_tensors(before), inputs_.size() - 1)];
  }

  static bool fits(const Term& term, size_t ndim) {
    const auto fixed = term.before.size() + term.after.size();
    return term.middle == Term::Middle::kNone ? ndim == fixed : ndim >= fixed;
  }

  /// The factor of a dim of `size`. 1 beside a larger size is whole.
  int place(int& factor, int64_t size) {
    if (factor == kNoFactor) {
      factor = factors_.add_factor(size);
    } else if (factors_.factors[factor].size == 1 && size != 1) {
      factors_.factors[factor].size = size; // what had size 1 is broadcast: `drop_broadcast` makes it whole
    }
    return factor;
  }

  int named(char letter, int64_t size) {
    if (letter == '*') return kNoFactor;
    return place(of_letter_[static_cast<unsigned char>(letter)], size);
  }

  TensorDims dims_of(const Term& term, const std::vector<int64_t>& sizes) {
    auto dims = whole_dims(sizes);
    const auto middle = sizes.size() - term.before.size() - term.after.size();
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (d < term.before.size()) {
        dims.factors[d] = named(term.before[d], sizes[d]);
      } else if (d >= term.before.size() + middle) {
        dims.factors[d] = named(term.after[d - term.before.size() - middle], sizes[d]);
      } else if (term.middle == Term::Middle::kBatch) {
        const auto from_right = term.before.size() + middle - 1 - d;
        if (batch_.size() <= from_right) batch_.resize(from_right + 1, kNoFactor);
        dims.factors[d] = place(batch_[from_right], sizes[d]);
      }
    }
    return dims;
  }

  bool place_inputs() {
    for (const auto& tensor : call_.tensors) {
      if (!tensor.defined) {
        factors_.inputs.emplace_back();
        continue;
      }
      const auto& term = term_of(tensor);
      if (!fits(term, tensor.sizes.size())) return false;
      factors_.inputs.push_back(dims_of(term, tensor.sizes));
      if (whole_dims_ == 0 && term.middle == Term::Middle::kWhole) {
        whole_dims_ = tensor.sizes.size() - term.before.size() - term.after.size();
      }
    }
    for (const auto& input : factors_.inputs) spoil_unequal(input);
    for (auto& input : factors_.inputs) drop_broadcast(input);
    return true;
  }

  /// Sizes that differ, where none is 1, may be the caller's mistake: whole tensors show it, a rank's parts may not.
  void spoil_unequal(const TensorDims& dims) {
    for (size_t d = 0; d < dims.factors.size(); ++d) {
      if (dims.factors[d] == kNoFactor || dims.sizes[d] <= 1) continue; // an operator passes over what is empty
      auto& size = factors_.factors[dims.factors[d]].size;
      if (dims.sizes[d] != size) size = kUnknownSize; // which no dim of an input has
    }
  }

  /// A dim whose size is not its factor's is whole.
  void drop_broadcast(TensorDims& dims) const {
    for (size_t d = 0; d < dims.factors.size(); ++d) {
      auto& factor = dims.factors[d];
      if (factor != kNoFactor && dims.sizes[d] >= 0 && factors_.factors[factor].size != dims.sizes[d]) factor = kNoFactor;
    }
  }

  bool place_outputs() {
    const auto* known = call_.outputs;
    const auto count = known ? known->size() : call_.output_count();
    for (size_t r = 0; r < count; ++r) {
      const auto& term = outputs_[std::min(r, outputs_.size() - 1)];
      if (known && !fits(term, (*known)[r].sizes.size())) return false;
      auto dims = known ? dims_of(term, (*known)[r].sizes) : unknown_dims(term);
      drop_broadcast(dims);
      factors_.outputs.push_back(std::move(dims));
    }
    return true;
  }

  TensorDims unknown_dims(const Term& term) const {
    TensorDims dims;
    const auto add = [&](int factor) { dims.add(factor, factor == kNoFactor ? kUnknownSize : factors_.factors[factor].size); };
    for (const char letter : term.before) add(of_letter_[static_cast<unsigned char>(letter)]); // none of '*'
    if (term.middle == Term::Middle::kWhole) {
      for (size_t d = 0; d < whole_dims_; ++d) add(kNoFactor);
    } else if (term.middle == Term::Middle::kBatch) {
      std::for_each(batch_.rbegin(), batch_.rend(), add);
    }
    for (const char letter : term.after) add(of_letter_[static_cast<unsigned char>(letter)]);
    return dims;
  }

  const OpCall& call_;
  std::vector<Term> inputs_, outputs_;
  Factorization factors_;
  std::array<int, 128> of_letter_{};
  size_t whole_dims_ = 0;  ///< that the first '~' stands for; a result has as many
  std::vector<int> batch_; ///< factors of the batch dims, the last dim first
};

} // namespace

size_t count_tensors(c10::ArrayRef<c10::Argument> arguments) {
  return std::count_if(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    const auto& type = argument.type();
    return type->isSubtypeOf(*c10::OptionalType::ofTensor()) || type->isSubtypeOf(*c10::ListType::ofTensors()) ||
           type->isSubtypeOf(*c10::ListType::ofOptionalTensors());
  });
}

Factorization pattern_factors(const OpCall& call, std::string_view pattern, std::string_view summed) {
  auto factors = Pattern(call, pattern).run(summed);
  return factors ? std::move(*factors) : whole_factors(call);
}

Factorize by_pattern(const std::string& pattern, const std::string& summed) {
  return [=](const OpCall& call) { return pattern_factors(call, pattern, summed); };
}

void add_patterns(Registry& registry, c10::ArrayRef<PatternLine> lines) {
  for (const auto& line : lines) {
    registry.add(line.names, OnLocals(by_pattern(std::string(line.pattern), std::string(line.summed))));
  }
}

} // namespace tessera::internal::rules
