#include <tessera/parallel/plan_for.h>

#include <absl/algorithm/container.h>
#include <absl/container/flat_hash_set.h>
#include <absl/strings/match.h>
#include <absl/strings/str_split.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/parallel/tensor/plan_lines.h>

namespace tessera::internal::parallel {

namespace {

bool is_among(const char* names, std::string_view name) {
  const std::vector<std::string> all = absl::StrSplit(names, ' ');
  return absl::c_any_of(all, [&](const auto& each) { return each == name; });
}

bool is_packed_projection(std::string_view name) {
  return is_among("qkv qkv_proj in_proj c_attn query_key_value Wqkv wqkv", name);
}
bool is_first(std::string_view name) {
  return is_among(
      "q k v q_proj k_proj v_proj query key value wq wk wv up gate up_proj gate_proj w1 w3 fc1 linear1 expand c_fc fc_in "
      "dense_h_to_4h intermediate.dense",
      name);
}
bool is_query(std::string_view name) { return is_among("q q_proj query wq", name); }
bool is_key_or_value(std::string_view name) { return is_among("k v k_proj v_proj key value wk wv", name); }
/// The layer behind attention, of those that `is_second` names.
bool is_behind_attention(std::string_view name) {
  return is_among("o o_proj out out_proj wo projection proj attn.c_proj attention.output.dense", name);
}
bool is_second(std::string_view name) {
  return is_among(
      "o o_proj out out_proj wo projection proj down down_proj w2 fc2 linear2 contract c_proj fc_out dense_4h_to_h "
      "output.dense",
      name);
}
bool is_head(std::string_view name) { return is_among("head lm_head output_head", name); }
/// A table of positions or kinds is small, and no rank has all tokens of a sequence beside it.
bool is_vocabulary(const std::string& name) {
  const std::vector<std::string> others{"pos", "type", "wpe", "segment"};
  return absl::c_none_of(others, [&](const auto& other) { return absl::StrContains(name, other); });
}

/// The last part of a path, and the last two: "dense", "intermediate.dense".
struct Names {
  explicit Names(const std::string& path) {
    const auto dot = path.rfind('.');
    last = path.substr(dot == std::string::npos ? 0 : dot + 1);
    const auto before = dot == std::string::npos || dot == 0 ? std::string::npos : path.rfind('.', dot - 1);
    last_two = before == std::string::npos ? path : path.substr(before + 1);
  }
  bool match(bool (*is_one)(std::string_view)) const { return is_one(last) || is_one(last_two); }
  std::string last, last_two;
};

class Guess {
 public:
  explicit Guess(const PlanOptions& options) : options_(options) {}

  std::optional<ParallelStyle> operator()(const NamedModule& module) const {
    const Names names(module.path);
    if (module.module->as<torch::nn::EmbeddingImpl>())
      return is_vocabulary(names.last) ? std::optional<ParallelStyle>(VocabParallel{stream()}) : std::nullopt;
    if (auto* attention = module.module->as<torch::nn::MultiheadAttentionImpl>())
      return divides(attention->options.num_heads()) ? std::optional<ParallelStyle>(Colwise{}) : std::nullopt;
    if (auto* linear = module.module->as<torch::nn::LinearImpl>()) return of_linear(*linear, names);
    return options_.sequence && is_norm(*module.module) ? std::optional<ParallelStyle>(Sequence{}) : std::nullopt;
  }

 private:
  Placement stream() const { return options_.sequence ? Placement(Shard{1}) : Placement(Replicate{}); }
  bool divides(int64_t size) const { return size % options_.ranks == 0; }
  int64_t key_heads() const { return options_.key_heads > 0 ? options_.key_heads : options_.heads; }
  static std::optional<ParallelStyle> style(ParallelStyle style) { return style; }

  std::optional<ParallelStyle> of_linear(const torch::nn::LinearImpl& linear, const Names& names) const {
    const auto outputs = linear.options.out_features(), inputs = linear.options.in_features();
    constexpr int64_t kBlocks = 3; // q, k and v
    const bool splits_heads = divides(options_.heads);
    if (names.match(is_query) && options_.heads > 0) return splits_heads ? style(Colwise{.heads = options_.heads}) : std::nullopt;
    if (names.match(is_key_or_value) && key_heads() > 0) return splits_heads ? style(KeyHeads{key_heads()}) : std::nullopt;
    if (names.match(is_behind_attention) && !splits_heads) return std::nullopt;
    const bool has_equal_blocks = options_.key_heads == 0 || options_.key_heads == options_.heads;
    if (names.match(is_packed_projection))
      return has_equal_blocks && splits_heads && divides(outputs / kBlocks) && outputs % kBlocks == 0
                 ? style(Colwise{.packed = kBlocks, .heads = options_.heads})
                 : std::nullopt;
    if (names.match(is_first) && divides(outputs)) return Colwise{};
    if (names.match(is_second) && divides(inputs)) return Rowwise{.output = stream()};
    if (names.match(is_head)) return VocabParallel{};
    return std::nullopt;
  }

  /// Whether all parameters are vectors of one size.
  static bool is_norm(const torch::nn::Module& module) {
    const auto parameters = module.parameters(/*recurse=*/false);
    return !parameters.empty() && module.children().empty() &&
           absl::c_all_of(parameters, [&](const auto& each) { return each.dim() == 1 && each.sizes() == parameters[0].sizes(); });
  }

  PlanOptions options_;
};

/// `path` with a wildcard for each number of a list.
std::string pattern_of(const std::string& path) {
  std::vector<std::string> parts = absl::StrSplit(path, '.');
  for (auto& part : parts) {
    if (!part.empty() && absl::c_all_of(part, [](unsigned char c) { return c >= '0' && c <= '9'; })) part = "*";
  }
  std::string pattern;
  for (const auto& part : parts) pattern += (&part == parts.data() ? "" : ".") + part;
  return pattern;
}

using Guessed = std::vector<std::pair<std::string, std::optional<ParallelStyle>>>; ///< path and style of each module

/// Whether the pattern stands for modules of this style alone.
bool is_common(const std::string& pattern, const std::string& style, const Guessed& all) {
  return absl::c_all_of(
      all, [&](const auto& each) { return !matches(pattern, each.first) || (each.second && to_string(*each.second) == style); });
}

} // namespace

} // namespace tessera::internal::parallel

namespace tessera {

ParallelPlan plan_for(torch::nn::Module& module, const PlanOptions& options) {
  namespace parallel = internal::parallel;
  TORCH_CHECK_VALUE(options.ranks > 0, "plan_for: ", options.ranks, " ranks");
  TORCH_CHECK_VALUE(options.heads >= 0 && options.key_heads >= 0 &&
                        (options.key_heads == 0 || (options.heads > 0 && options.heads % options.key_heads == 0)),
                    "plan_for: ", options.heads, " heads of queries and ", options.key_heads,
                    " of keys: the queries of each key are a group of one size");
  const parallel::Guess guess(options);
  parallel::Guessed all;
  for (const auto& each : parallel::modules_below(module)) all.emplace_back(each.path, guess(each));
  ParallelPlan plan;
  absl::flat_hash_set<std::string> known;
  for (const auto& [path, style] : all) {
    if (!style) continue;
    auto pattern = parallel::pattern_of(path);
    if (!parallel::is_common(pattern, to_string(*style), all)) pattern = path;
    if (known.insert(pattern).second) plan.push_back({pattern, *style});
  }
  return plan;
}

} // namespace tessera
