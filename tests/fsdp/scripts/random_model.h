#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/tests/fsdp/scripts/block.h>

namespace tessera::testing::scripts {

/// Called with the position in the order of blocks and that block's output; returns what goes on in its place.
using Tap = std::function<Tensor(size_t, const Tensor&)>;

/// Runs a block on its two inputs.
using RunBlock = std::function<Tensor(const BlockPtr&, const Tensor& x, const Tensor& ids)>;

/// Two to five blocks drawn from a pool of kinds, and a head. Some parameters are frozen, a weight may be tied to another
/// block's, and a block may be registered twice.
class RandomModel : public torch::nn::Module {
 public:
  RandomModel(uint64_t seed, const std::vector<BlockKind>& pool);
  /// Runs the blocks in `order`, which may leave some out and name some twice. Returns [batch, 2]. Each block
  /// runs by `run`, or without one by its forward.
  Tensor forward(const Tensor& x, const Tensor& ids, const std::vector<size_t>& order, const Tap& tap = {},
                 const RunBlock& run = {});
  /// All of them once, or any.
  std::vector<size_t> random_order(Draw& draw) const;
  std::vector<size_t> whole_order() const;

  /// From now on the input of each block, and of the head, is cast to `dtype`.
  void set_input_dtype(std::optional<torch::Dtype> dtype) { input_dtype_ = dtype; }
  bool casts_inputs() const { return input_dtype_.has_value(); }

  /// Another block at the end, drawn from `seed`; or another head.
  void add_random_block(uint64_t seed);
  void renew_head(uint64_t seed);

  const std::vector<BlockPtr>& blocks() const { return blocks_; }
  const Tensor& head() const { return head_; }
  bool is_twice_differentiable() const;
  bool has_inner_backward() const;
  bool reads_beside_gradient() const;
  /// All parameters are double (or complex double): no rounding beyond 1e-9 is to be expected.
  bool is_double() const;
  const std::string& description() const { return description_; }

 private:
  template <typename Property> // bool(const Block&)
  bool any_block(const Property& property) const;
  void add_block(const std::string& name, const BlockKind& kind, Draw& draw);
  void tie_weights(Draw& draw);

  std::vector<BlockPtr> blocks_;
  Tensor head_;
  std::optional<torch::Dtype> input_dtype_;
  std::string description_;
};

} // namespace tessera::testing::scripts
