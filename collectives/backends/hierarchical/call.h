#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collectives/backends/gloo/exchange.h>
#include <tessera/collectives/backends/hierarchical/links.h>
#include <tessera/collectives/backends/shared_memory/motion.h>
#include <tessera/collectives/calls/signature.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::internal::hierarchical {

/// One collective in flight: a row of steps between the hosts and inside one, which the communicator's thread takes.
///
/// Each step is completed for nobody: it throws nothing and records no rank as missing. Only who waits for the call learns of the
/// step that failed.
class Call {
 public:
  struct Subject {
    std::string text; ///< for errors: all_gather 'blocks.0' of group default [0, 1, 2, 3] on rank 1
    CollectiveKind kind;
    std::string label;
    Signature signature;             ///< without its sequence number
    std::vector<at::Tensor> tensors; ///< kept alive until the end
  };

  Call(std::shared_ptr<const Links> links, Subject subject) : links_(std::move(links)), subject_(std::move(subject)) {}

  /// Sends every rank of the group what this one calls, in the order of the calls. First, and before `run`.
  void announce();
  /// Takes the steps. What of them fails ends the call, and all that use the links.
  void run(const std::function<void(Call&)>& steps);
  /// Blocks until the result is valid, or throws why it never will be: also on later calls.
  void wait();
  bool is_completed() const;

  // The steps use the following. All but `across` throw where they fail, for `run` to catch.

  const Links& links() const { return *links_; }
  /// Starts an exchange with the ranks of the column, by host.
  std::shared_ptr<gloo::Exchange> across(gloo::ExchangePlan plan);
  void complete(const std::shared_ptr<gloo::Exchange>& exchange);
  /// Returns when every rank of the group has called the same. Before anything of the caller's is written.
  void agree();
  /// Moves data between the ranks of this host, by column.
  void within(shared_memory::Motion motion);

 private:
  struct StepFailed {}; ///< for `run`

  void end_with(const std::exception_ptr& failure);
  void note_failure(const std::exception_ptr& failure, std::function<void()> explain);
  void complete_operation(const std::shared_ptr<shared_memory::Operation>& operation);

  const std::shared_ptr<const Links> links_;
  Subject subject_;
  std::shared_ptr<gloo::Exchange> announcement_;
  std::vector<std::shared_ptr<gloo::Exchange>> started_; ///< and not completed
  bool has_agreed_ = false;

  mutable std::mutex mutex_; // guards what follows
  std::condition_variable ended_;
  bool is_completed_ = false;
  std::function<void()> explain_; ///< throws why the call failed
};

} // namespace tessera::internal::hierarchical
