#pragma once

#include <tessera/collectives/backends/shared_memory/engine.h>
#include <tessera/collectives/backends/shared_memory/memory/arena.h>
#include <tessera/collectives/calls/checked_communicator.h>

#include <memory>

namespace tessera::internal::shared_memory {

/// Collectives on CPU tensors of ranks that share this host's memory.
///
/// Small payloads lie beside the signature, and each rank reads what it needs. Longer ones go through chunks that stay in the
/// processors' caches: a rank copies its input into them piece by piece, and the others copy or sum from there to their output.
/// dtypes: all for data movement; real numbers and bool for reductions, as `reduce` does them, in the order of the ranks.
class SharedMemoryCommunicator final : public CheckedCommunicator {
 public:
  /// `arena`: this process's, or null.
  SharedMemoryCommunicator(std::string name, RankList ranks, int rank, std::shared_ptr<Engine> engine,
                           std::shared_ptr<Arena> arena);
  ~SharedMemoryCommunicator() override;

  void close() override { engine_->leave(); }
  void end() override { engine_->close(); }
  c10::DataPtr allocate(int64_t bytes) override;

 private:
  Work start(CollectiveCall&& call) override;
  Motion motion_of(const CollectiveCall& call) const;
  void gather(const CollectiveCall& call, Motion& motion) const;
  bool is_shared(const at::Tensor& tensor) const; ///< lies where the other ranks can read it

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Arena> arena_;
};

} // namespace tessera::internal::shared_memory
