#pragma once

#include <tessera/collectives/coalesced_calls.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/shared_memory/arena.h>
#include <tessera/collectives/shared_memory/engine.h>

#include <memory>

namespace tessera::internal::shared_memory {

/// Collectives on CPU tensors of ranks that share this host's memory.
///
/// Small payloads lie beside the signature, and each rank reads what it needs. Longer ones go through chunks that stay in the
/// processors' caches: a rank copies its input into them piece by piece, and the others copy or sum from there to their output.
/// dtypes: all for data movement; real numbers and bool for reductions, as `reduce` does them, in the order of the ranks.
class SharedMemoryCommunicator final : public Communicator {
 public:
  /// `arena`: this process's, or null.
  SharedMemoryCommunicator(std::string name, RankList ranks, int rank, std::shared_ptr<Engine> engine,
                           std::shared_ptr<Arena> arena);
  ~SharedMemoryCommunicator() override;

  Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) override;
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) override;
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) override;
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits, std::string_view label) override;
  Work broadcast(const at::Tensor& tensor, int root, std::string_view label) override;
  Work send(const at::Tensor& tensor, int to, std::string_view label) override;
  Work receive(const at::Tensor& tensor, int from, std::string_view label) override;
  Work coalesced(const std::function<void()>& issue) override;
  void barrier(std::string_view label) override;
  void close() override { engine_->close(); }
  c10::DataPtr allocate(int64_t bytes) override;

 private:
  bool is_shared(const at::Tensor& tensor) const; ///< lies where the other ranks can read it
  Work run(Request request, int64_t bytes, Engine::LaneKey lane = {});

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Arena> arena_;
  CoalescedCalls coalesced_;
};

} // namespace tessera::internal::shared_memory
