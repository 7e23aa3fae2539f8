#pragma once

#include <tessera/collectives/process_context.h>
#include <tessera/collectives/start/thread_context.h>

namespace tessera::internal {

/// While it lives, the calling thread is a rank of its own: `process_context()` is this one's there, and in every backward that
/// is called in it.
class RankScope {
 public:
  using Connect = ProcessContext::Connect;

  RankScope(int rank, int world_size, const ProcessGroupOptions& options, c10::intrusive_ptr<c10d::Store> store, Connect connect)
      : guard_(enter_context(make(rank, world_size, options, std::move(store), std::move(connect)))) {}
  RankScope(const RankScope&) = delete;
  RankScope& operator=(const RankScope&) = delete;

 private:
  static std::shared_ptr<ProcessContext> make(int rank, int world_size, const ProcessGroupOptions& options,
                                              c10::intrusive_ptr<c10d::Store> store, Connect connect) {
    std::shared_ptr<ProcessContext> made(new ProcessContext(rank, world_size, std::move(connect)));
    made->local_rank_ = rank;
    made->options_ = options;
    made->store_ = std::move(store);
    return made;
  }

  c10::DebugInfoGuard guard_;
};

} // namespace tessera::internal
