#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace tessera::testing::sim {

/// A `T` of each operator, made where it is first asked for, and never moved.
template <typename T>
class PerOperator {
 public:
  template <typename Make> // std::unique_ptr<T>()
  T& of(const c10::OperatorHandle& op, const Make& make) {
    const std::lock_guard lock(mutex_);
    auto& found = by_address_[&op.schema()];
    if (found && found->first == op.operator_name()) return *found->second;
    auto& named = *by_name_.try_emplace(op.operator_name()).first; // the address may be that of an operator that is gone
    if (!named.second) named.second = make();
    found = &named;
    return *named.second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<c10::OperatorName, std::unique_ptr<T>> by_name_;
  std::unordered_map<const c10::FunctionSchema*, typename decltype(by_name_)::value_type*> by_address_; // for speed
};

/// What the schema of an operator tells of how it must be run.
struct OperatorTraits {
  enum class Kind {
    kPlain,
    kView,
    kSynchronous, ///< what it returns depends on values: the host must wait for it
    kRandom
  };
  struct Return {
    std::optional<size_t> argument; ///< that it is; none for a new tensor
    bool is_list = false;
  };

  Kind kind = Kind::kPlain;
  std::vector<bool> is_written; ///< by argument
  std::vector<Return> returns;
  bool reads_tensors = false; ///< the results depend on their values

  static const OperatorTraits& of(const c10::OperatorHandle& op);
};

} // namespace tessera::testing::sim
