#pragma once

// Internal: what a NanGuard sees of operators, and what it makes of that.

#include <ATen/core/Tensor.h>
#include <ATen/core/operator_name.h>
#include <ATen/record_function.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::internal {

/// Which tensors of an operator's call have values to look at.
struct ValueTraits {
  bool returns_values = true;        ///< not a view, nor memory that nobody has written
  bool casts = false;                ///< what it gets it returns, also what nobody has written
  std::vector<bool> is_only_written; ///< for each argument: its values before the call mean nothing
  std::vector<bool> is_written;      ///< for each argument: in place
};

/// A node of autograd.
struct BackwardNode {
  std::string name; ///< empty: none
  int read = -1;    ///< the parameter that forward had read last when it made the node
};

/// The place of a thread in its forward or backward.
struct ModulePosition {
  int last_read = -1;           ///< the parameter that an operator read last
  int depth = 0;                ///< operators that read it and have not ended
  int calls = 0, casts = 0;     ///< operators that have not ended
  std::map<int64_t, int> reads; ///< by the number that autograd's next node would get: the parameter that was read then
  BackwardNode node;            ///< that runs; none in forward, and in hooks between nodes
  BackwardNode last_node;       ///< that has run in this backward
};

/// The first operator that got or made NaN, since the last `take`. Its functions are called by any thread.
class NanSearch {
 public:
  NanSearch(const torch::nn::Module& model, bool infinities);

  struct Finding {
    int64_t number = 0; ///< of the operator, from 0
    std::string text;
  };
  /// What was found. Begins anew.
  std::optional<Finding> take();

  /// What `end` needs to know of `begin`.
  struct Begun final : at::ObserverContext {
    bool reads_parameter = false;
    bool is_call = false;                   ///< of an operator
    bool had_it = false;                    ///< a cast, of what had NaN before
    std::optional<BackwardNode> outer_node; ///< where this is a node: that which it runs in
  };
  std::unique_ptr<Begun> begin(const at::RecordFunction& function);
  void end(const at::RecordFunction& function, const Begun& begun);

 private:
  void begin_node(const at::RecordFunction& node, ModulePosition& position, Begun& begun);
  void begin_operator(const at::RecordFunction& function, ModulePosition& position, Begun& begun);
  const ValueTraits& traits_of(const at::RecordFunction& function);
  bool is_bad(const c10::IValue& value) const;
  void found(const at::RecordFunction& function, const char* what, const ModulePosition& position);
  std::string place_of(const ModulePosition& position) const;

  const bool infinities_;
  std::mutex mutex_;                 // guards what follows
  std::vector<std::string> modules_; ///< of each parameter
  std::vector<at::Tensor> parameters_;
  std::unordered_map<const at::TensorImpl*, int> index_;
  std::unordered_map<c10::OperatorName, ValueTraits> traits_;
  std::map<uint64_t, ModulePosition> positions_; ///< by thread
  int64_t operators_ = 0;
  std::optional<Finding> finding_;
};

} // namespace tessera::internal
