#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/ranks.h>
#include <tessera/checkpoint/save_session.h>
#include <tessera/checkpoint/snapshot.h>

#include <exception>
#include <future>

namespace tessera::checkpoint {

class Checkpointer::Impl {
 public:
  ~Impl() {
    if (saving_.valid()) saving_.wait();
  }

  void save(const StateDict& state, const std::filesystem::path& dir, const SaveOptions& options) {
    wait();
    // No vote here, where the training waits: the thread tells the other ranks.
    std::exception_ptr failure;
    try {
      copied_ = copies_.copy(snapshot_of(state));
    } catch (...) {
      failure = std::current_exception();
    }
    saving_ = std::async(std::launch::async, [this, dir, options, failure] {
      ranks_.all("copy the state for " + dir.string(), [&] {
        if (failure) std::rethrow_exception(failure);
        return std::string();
      });
      save_snapshot(ranks_, copied_, planner_, dir, options);
    });
  }

  void wait() {
    if (saving_.valid()) saving_.get();
  }

 private:
  // The thread's votes need a group of their own, beside the collectives of the training and of other checkpointers.
  const Ranks ranks_ = Ranks::unshared("checkpoint in the background");
  HostCopies copies_;
  Snapshot copied_;
  Planner planner_;
  std::future<void> saving_;
};

Checkpointer::Checkpointer() : impl_(std::make_unique<Impl>()) {}
Checkpointer::~Checkpointer() = default;

void Checkpointer::save(const StateDict& state, const std::filesystem::path& dir, const SaveOptions& options) {
  impl_->save(state, dir, options);
}

void Checkpointer::wait() { impl_->wait(); }

} // namespace tessera::checkpoint
