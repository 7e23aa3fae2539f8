#include <tessera/dtensor/rules/patterns.h>

#include <absl/strings/str_split.h>

#include <algorithm>
#include <array>

namespace tessera::rules {

namespace {

/// One term taken apart: what stands before and after its variable part, and what that is.
struct Term {
  std::string before, after;
  enum class Middle { kNone, kBatch, kWhole } middle = Middle::kNone;
};

Term parse(std::string_view text) {
  const auto dots = text.find("..."), tilde = text.find('~');
  if (dots != std::string_view::npos) {
    return {std::string(text.substr(0, dots)), std::string(text.substr(dots + 3)), Term::Middle::kBatch};
  }
  if (tilde != std::string_view::npos) {
    return {std::string(text.substr(0, tilde)), std::string(text.substr(tilde + 1)), Term::Middle::kWhole};
  }
  return {std::string(text), "", Term::Middle::kNone};
}

std::vector<Term> parse_list(absl::string_view text) {
  std::vector<Term> terms;
  for (const auto part : absl::StrSplit(text, ',')) terms.push_back(parse({part.data(), part.size()}));
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
    for (auto& factor : factors_.factors) factor.no_empty = true;
    return std::move(factors_);
  }

 private:
  const Term& term_of(const TensorArg& tensor) {
    size_t index = 0; // of the argument among those that are tensors
    const auto is_tensor = [&](size_t argument) {
      auto type = call_.schema.arguments()[argument].type();
      return type->isSubtypeOf(*c10::OptionalType::ofTensor()) || type->isSubtypeOf(*c10::ListType::ofTensors()) ||
             type->isSubtypeOf(*c10::ListType::ofOptionalTensors());
    };
    for (size_t argument = 0; argument < tensor.argument; ++argument) index += is_tensor(argument) ? 1 : 0;
    return inputs_[std::min(index, inputs_.size() - 1)];
  }

  static bool fits(const Term& term, size_t ndim) {
    const auto fixed = term.before.size() + term.after.size();
    return term.middle == Term::Middle::kNone ? ndim == fixed : ndim >= fixed;
  }

  /// The factor of a dim of `size`. 1 beside a larger size is whole; sizes that differ otherwise make the factor unusable.
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
    TensorDims dims{{}, sizes};
    dims.factors.resize(sizes.size(), kNoFactor);
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
    for (auto& input : factors_.inputs) drop_broadcast(input);
    return true;
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
    const auto add = [&](int factor) {
      dims.factors.push_back(factor);
      dims.sizes.push_back(factor == kNoFactor ? kUnknownSize : factors_.factors[factor].size);
    };
    for (const char letter : term.before) add(letter == '*' ? kNoFactor : of_letter_[static_cast<unsigned char>(letter)]);
    if (term.middle == Term::Middle::kWhole) {
      for (size_t d = 0; d < whole_dims_; ++d) add(kNoFactor);
    } else if (term.middle == Term::Middle::kBatch) {
      std::for_each(batch_.rbegin(), batch_.rend(), add);
    }
    for (const char letter : term.after) add(letter == '*' ? kNoFactor : of_letter_[static_cast<unsigned char>(letter)]);
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

Factorization whole_factors(const OpCall& call) {
  Factorization factors;
  const auto whole = [](const std::vector<int64_t>& sizes) {
    return TensorDims{absl::InlinedVector<int, 6>(sizes.size(), kNoFactor), sizes};
  };
  for (const auto& tensor : call.tensors) factors.inputs.push_back(whole(tensor.sizes));
  if (call.outputs) {
    for (const auto& output : *call.outputs) factors.outputs.push_back(whole(output.sizes));
  } else {
    factors.outputs_unknown = true;
  }
  return factors;
}

Factorization pattern_factors(const OpCall& call, std::string_view pattern, std::string_view summed) {
  auto factors = Pattern(call, pattern).run(summed);
  return factors ? std::move(*factors) : whole_factors(call);
}

void add_patterns(Registry& registry, c10::ArrayRef<PatternLine> lines) {
  for (const auto& line : lines) {
    registry.add(line.names,
                 {.factorize = [line](const OpCall& call) { return pattern_factors(call, line.pattern, line.summed); }});
  }
}

} // namespace tessera::rules
