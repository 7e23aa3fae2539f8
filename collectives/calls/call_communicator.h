#pragma once

#include <tessera/collectives/calls/collective_call.h>
#include <tessera/collectives/communicator.h>

#include <string_view>
#include <vector>

namespace tessera::internal {

/// A communicator of which every collective is one function.
class CallCommunicator : public Communicator {
 public:
  Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) final;
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) final;
  Work reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& input, double factor, std::string_view label) final;
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) final;
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits, std::string_view label) final;
  Work broadcast(const at::Tensor& tensor, int root, std::string_view label) final;
  Work send(const at::Tensor& tensor, int to, std::string_view label) final;
  Work receive(const at::Tensor& tensor, int from, std::string_view label) final;
  void barrier(std::string_view label) override;

  /// What they all do. May take what the call holds.
  virtual Work run(CollectiveCall&& call) = 0;
  /// Does what `close` does, but does not say that this rank goes on: for destructors.
  virtual void end() { close(); }

 protected:
  using Communicator::Communicator;
};

} // namespace tessera::internal
