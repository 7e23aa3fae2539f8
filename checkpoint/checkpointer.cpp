#include <c10/util/Exception.h>
#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/save/save_session.h>
#include <tessera/checkpoint/save/snapshot.h>
#include <tessera/checkpoint/state/ranks.h>

#include <exception>
#include <future>

namespace tessera::checkpoint {

class Checkpointer::Impl {
 public:
  explicit Impl(const std::optional<DeviceMesh>& mesh)
      : mesh_(mesh), ranks_(internal::Ranks::unshared(mesh, "checkpoint in the background")) {}
  ~Impl() {
    if (saving_.valid()) saving_.wait();
  }

  void save(const StateDict& state, internal::Destination to, const SaveOptions& options) {
    TORCH_CHECK(!options.mesh || options.mesh == mesh_, "checkpoint: SaveOptions::mesh is another than the Checkpointer's");
    wait();
    // No vote here, where the training waits: the thread tells the other ranks.
    std::exception_ptr failure;
    try {
      copied_ = copies_.copy(internal::snapshot_of(state));
    } catch (...) {
      failure = std::current_exception();
    }
    std::error_code unknown;                          // an error of this rank alone, of which the vote tells
    to.base = std::filesystem::current_path(unknown); // now, as the choice below: the program may go elsewhere meanwhile
    auto chosen = options;
    chosen.differing_tensors = options.differing_tensors.value_or(differing_tensors()); // now, not when the thread comes to it
    // The thread is a part of this rank, also where ranks are threads.
    saving_ = std::async(std::launch::async, [this, to, chosen, failure, info = c10::ThreadLocalDebugInfo::current()] {
      const c10::DebugInfoGuard as_caller(info);
      const auto take = [&] {
        if (failure) std::rethrow_exception(failure);
        return copied_;
      };
      internal::save_snapshot(ranks_, take, planner_, to, chosen);
    });
  }

  void wait() {
    if (saving_.valid()) saving_.get();
  }

 private:
  // The thread's votes need a group of their own, beside the collectives of the training and of other checkpointers.
  const std::optional<DeviceMesh> mesh_;
  const internal::Ranks ranks_;
  internal::HostCopies copies_;
  internal::Snapshot copied_;
  internal::Planner planner_;
  std::future<void> saving_;
};

Checkpointer::Checkpointer(const std::optional<DeviceMesh>& mesh) : impl_(std::make_unique<Impl>(mesh)) {}
Checkpointer::~Checkpointer() = default;

void Checkpointer::save(const StateDict& state, const std::filesystem::path& dir, const SaveOptions& options) {
  impl_->save(state, {dir}, options);
}

void Checkpointer::save(const StateDict& state, Storage& storage, const std::string& name, const SaveOptions& options) {
  impl_->save(state, {name, &storage}, options);
}

void Checkpointer::wait() { impl_->wait(); }

} // namespace tessera::checkpoint
