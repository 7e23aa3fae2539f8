#include <c10/util/Exception.h>

#include <absl/strings/numbers.h>
#include <absl/strings/str_split.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/base/edit_distance.h>
#include <tessera/fsdp/communication.h>

namespace tessera {

namespace internal {

namespace {

constexpr std::array<std::string_view, 7> kSettingNames{"gather",   "reduction", "inner",         "block",
                                                        "smallest", "rank",      "error_feedback"};

std::string nearest_of(const std::string& name) {
  const auto nearest = std::min_element(kSettingNames.begin(), kSettingNames.end(), [&](const auto& a, const auto& b) {
    return edit_distance(a, name) < edit_distance(b, name);
  });
  return edit_distance(*nearest, name) <= 3 ? fmt::format("; did you mean \"{}\"?", *nearest) : "";
}

/// The settings of a text, by their names.
class CommunicationText {
 public:
  explicit CommunicationText(const std::string& text) : text_(text) {
    for (const auto part : absl::StrSplit(text, absl::ByAnyChar(", "), absl::SkipEmpty())) {
      const std::pair<std::string, std::string> setting = absl::StrSplit(part, absl::MaxSplits('=', 1));
      const auto& [name, value] = setting;
      TORCH_CHECK_VALUE(std::find(kSettingNames.begin(), kSettingNames.end(), name) != kSettingNames.end(), where(), name,
                        " is no setting", nearest_of(name));
      TORCH_CHECK_VALUE(values_.emplace(name, value).second, where(), name, " is there twice");
      const bool is_flag = name == "error_feedback";
      TORCH_CHECK_VALUE(is_flag ? value.empty() : !value.empty(), where(), name, is_flag ? " takes no value" : " has no value");
    }
  }

  std::string where() const { return "communication \"" + text_ + "\": "; }
  bool has(const std::string& name) const { return values_.contains(name); }
  std::string text(const std::string& name) const { return has(name) ? values_.at(name) : ""; }

  int64_t number(const std::string& name, int64_t otherwise) const {
    if (!has(name)) return otherwise;
    int64_t value = 0;
    TORCH_CHECK_VALUE(absl::SimpleAtoi(values_.at(name), &value) && value >= 0, where(), name, " is ", values_.at(name),
                      ", but must be a number that is not negative");
    return value;
  }

  BlockCodec codec(const std::string& name) const {
    const auto value = text(name);
    for (const auto wire : {Wire::kInt8, Wire::kInt4, Wire::kFloat8, Wire::kSign}) {
      if (value != to_string(wire)) continue;
      const BlockCodec made{.wire = wire, .block = number("block", BlockCodec().block)};
      check_codec(made, where());
      return made;
    }
    TORCH_CHECK_VALUE(false, where(), name, " is ", value, ", but must be int8, int4, fp8 or sign",
                      name == "reduction" ? ", or power-sgd" : "");
  }

  /// An error where `name` stands without another one that gives it a meaning.
  void check_needs(const std::string& name, bool is_used, const char* what) const {
    TORCH_CHECK_VALUE(!has(name) || is_used, where(), name, " is for ", what);
  }

 private:
  std::string text_;
  std::map<std::string, std::string> values_;
};

} // namespace

} // namespace internal

Communication communication_of(const std::string& text) {
  const internal::CommunicationText given(text);
  const bool is_low_rank = given.text("reduction") == "power-sgd", is_coded = given.has("reduction") && !is_low_rank;
  given.check_needs("inner", is_coded, "a quantized reduction");
  given.check_needs("error_feedback", is_coded, "a quantized reduction");
  given.check_needs("rank", is_low_rank, "reduction=power-sgd");
  given.check_needs("block", is_coded || given.has("gather"), "what is quantized");
  given.check_needs("smallest", is_coded || given.has("gather"), "what is quantized");
  Communication communication;
  const int64_t smallest = given.number("smallest", QuantizedReduction().smallest);
  if (given.has("gather")) communication.gather = QuantizedGather{.codec = given.codec("gather"), .smallest = smallest};
  if (is_low_rank) communication.reduction = power_sgd({.rank = given.number("rank", PowerSGD().rank)});
  if (!is_coded) return communication;
  QuantizedReduction reduction{
      .codec = given.codec("reduction"), .smallest = smallest, .error_feedback = given.has("error_feedback")};
  if (given.has("inner")) reduction.inner = given.codec("inner");
  communication.reduction = quantized_reduction(reduction);
  return communication;
}

} // namespace tessera
