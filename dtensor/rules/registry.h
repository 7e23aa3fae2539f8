#pragma once

#include <absl/container/flat_hash_map.h>

#include <string>
#include <string_view>

#include <tessera/dtensor/rules/rule.h>

namespace tessera::internal::rules {

/// The rules of PyTorch's operators, by name. Filled at the first use; not changed afterwards.
class Registry {
 public:
  static const Registry& instance();

  /// `names`: separated by blanks, without namespace and without the underscore of in-place variants that have the same rule.
  /// "add" stands for every overload that has no entry of its own ("add.Scalar", which is that of "add.Scalar_out" too). An error
  /// when a name is there already.
  void add(std::string_view names, const Rule& rule);
  /// The rule of "aten::add_.Tensor", or of a user's operator; null without one. What changes a tensor's own shape (squeeze_) has
  /// one of its own or none.
  const Rule* find(const c10::OperatorHandle& op) const;
  /// The rule for operators that PyTorch tags as pointwise.
  const Rule& pointwise() const { return pointwise_; }
  /// Runs an operator on whole tensors.
  const Rule& whole() const { return whole_; }

 private:
  Registry();
  absl::flat_hash_map<std::string, Rule> rules_;
  const Rule pointwise_, whole_;
};

/// Adds the rule of an operator that is not PyTorch's, by its full name ("my::attention"); false when it has one already.
/// Thread-safe.
bool add_user_rule(const std::string& name, Rule rule);

// One function a file of rules.
void register_pointwise(Registry& registry);
void register_foreach(Registry& registry);
void register_reductions(Registry& registry);
void register_matmul(Registry& registry);
void register_scaled_mm(Registry& registry);
void register_views(Registry& registry);
void register_cuts(Registry& registry);
void register_shapes(Registry& registry);
void register_factories(Registry& registry);
void register_random(Registry& registry);
void register_scalars(Registry& registry);
void register_embedding(Registry& registry);
void register_indexing(Registry& registry);
void register_linalg(Registry& registry);
void register_spatial(Registry& registry);
void register_normalization(Registry& registry);
void register_softmax(Registry& registry);
void register_losses(Registry& registry);
void register_attention(Registry& registry);

} // namespace tessera::internal::rules
