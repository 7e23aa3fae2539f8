#include <tessera/collectives/staged/staged_communicator.h>

#include <tessera/collectives/checks.h>
#include <tessera/collectives/coalesced_calls.h>
#include <tessera/collectives/current_stream.h>
#include <tessera/collectives/output_guard.h>
#include <tessera/collectives/staged/task_thread.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <utility>

namespace tessera::internal {

namespace {

std::shared_ptr<c10::Event> record(const c10::Stream& stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  return event;
}

/// Page-locked where the device is CUDA's, so that copies are asynchronous.
at::Tensor host_tensor_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).pinned_memory(tensor.is_cuda()));
}

using Launched = std::shared_future<std::shared_ptr<c10::Event>>;

class StagedWork final : public WorkState {
 public:
  StagedWork(Launched copied_back, c10::Device device) : copied_back_(std::move(copied_back)), device_(device) {}
  void wait() override {
    if (const auto event = copied_back_.get()) event->block(current_stream(device_));
  }
  bool is_completed() override {
    if (copied_back_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return false;
    const auto event = copied_back_.get();
    return !event || event->query();
  }

 private:
  Launched copied_back_;
  c10::Device device_;
};

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(CommunicatorPtr on_host, c10::Device device)
      : Communicator(on_host->name(), on_host->ranks(), on_host->rank(), device.type()),
        on_host_(std::move(on_host)),
        device_(device),
        stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}
  /// The threads come to their end, whatever they wait for.
  ~StagedCommunicator() override { on_host_->close(); }
  StagedCommunicator(const StagedCommunicator&) = delete;
  StagedCommunicator& operator=(const StagedCommunicator&) = delete;

  Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) override {
    check_all_gather(*this, output, input, label);
    counters_.add(CollectiveKind::kAllGather, static_cast<int64_t>(output.nbytes()));
    return run(input, output, label, [](Communicator& host, const auto& to, const auto& from, const auto& text) {
      return host.all_gather_into(to, from, text);
    });
  }

  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) override {
    check_reduce_scatter(*this, output, input, op, label);
    counters_.add(CollectiveKind::kReduceScatter, static_cast<int64_t>(input.nbytes()));
    return run(input, output, label, [op](Communicator& host, const auto& to, const auto& from, const auto& text) {
      return host.reduce_scatter(to, from, op, text);
    });
  }

  Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) override {
    check_all_reduce(*this, tensor, op, label);
    counters_.add(CollectiveKind::kAllReduce, static_cast<int64_t>(tensor.nbytes()));
    return run(tensor, tensor, label,
               [op](Communicator& host, const auto& to, const auto&, const auto& text) { return host.all_reduce(to, op, text); });
  }

  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits, std::string_view label) override {
    check_all_to_all(*this, output, input, output_splits, input_splits, label);
    counters_.add(CollectiveKind::kAllToAll, static_cast<int64_t>(std::max(output.nbytes(), input.nbytes())));
    return run(input, output, label,
               [output_splits, input_splits](Communicator& host, const auto& to, const auto& from, const auto& text) {
                 return host.all_to_all(to, from, output_splits, input_splits, text);
               });
  }

  Work broadcast(const at::Tensor& tensor, int root, std::string_view label) override {
    check_broadcast(*this, tensor, root, label);
    counters_.add(CollectiveKind::kBroadcast, static_cast<int64_t>(tensor.nbytes()));
    return run(tensor, tensor, label, [root](Communicator& host, const auto& to, const auto&, const auto& text) {
      return host.broadcast(to, root, text);
    });
  }

  Work send(const at::Tensor& tensor, int to, std::string_view label) override {
    check_send(*this, tensor, to, label);
    counters_.add(CollectiveKind::kSend, static_cast<int64_t>(tensor.nbytes()));
    return exchange(
        {CollectiveKind::kSend, to}, tensor, at::Tensor(), label,
        [to](Communicator& host, const auto&, const auto& from, const auto& text) { return host.send(from, to, text); });
  }

  Work receive(const at::Tensor& tensor, int from, std::string_view label) override {
    check_receive(*this, tensor, from, label);
    counters_.add(CollectiveKind::kReceive, static_cast<int64_t>(tensor.nbytes()));
    return exchange(
        {CollectiveKind::kReceive, from}, at::Tensor(), tensor, label,
        [from](Communicator& host, const auto& to, const auto&, const auto& text) { return host.receive(to, from, text); });
  }

  Work coalesced(const std::function<void()>& issue) override { return coalesced_.run(issue, name()); }

  void barrier(std::string_view label) override {
    counters_.add(CollectiveKind::kBarrier, 0);
    run_and_wait([&] { on_host_->barrier(label); });
  }

  void give_up(std::string_view cause) override {
    run_and_wait([&] { on_host_->give_up(cause); });
  }

  void close() override { on_host_->close(); }

 private:
  using Promise = std::promise<std::shared_ptr<c10::Event>>;
  using Direction = std::pair<CollectiveKind, int>; // with the peer

  /// `call` of the host alone, after those before it.
  template <typename Call>
  void run_and_wait(const Call& call) {
    std::promise<void> done;
    auto ended = done.get_future();
    thread_.run([&] {
      try {
        call();
        done.set_value();
      } catch (...) {
        done.set_exception(std::current_exception());
      }
    });
    ended.get();
  }

  /// `collective` (Work(Communicator&, output, input, label)) of the host's copies. Where `input` is `output`, so are the copies.
  template <typename Collective>
  Work run(const at::Tensor& input, const at::Tensor& output, std::string_view label, Collective collective) {
    return start(input, output, label, std::move(collective), [](const auto& finish) { finish(); });
  }

  /// A message waits apart, because the other side's may depend on a call that follows here: of its direction to or from its
  /// peer, where messages keep their order, on none.
  template <typename Message>
  Work exchange(Direction direction, const at::Tensor& input, const at::Tensor& output, std::string_view label, Message message) {
    return start(input, output, label, std::move(message),
                 [this, direction](const auto& finish) { messages_[direction].run(finish); });
  }

  /// `run_finish` takes what waits for the host, where it may wait.
  template <typename Collective, typename RunFinish>
  Work start(const at::Tensor& input, const at::Tensor& output, std::string_view label, Collective collective,
             RunFinish run_finish) {
    const c10::InferenceMode training(false); // the copies are written by a thread that knows nothing of the caller's mode
    const at::NoGradGuard no_grad;
    const at::Tensor from = input.defined() ? host_tensor_like(input) : input;
    const at::Tensor to = !output.defined() || input.is_same(output) ? from : host_tensor_like(output);
    record(current_stream(device_))->block(stream_);
    if (input.defined()) {
      const c10::StreamGuard guard(stream_);
      const at::DisableRecordFunctionGuard no_record; // as no other transport shows an operator that reads a buffer's gaps
      from.copy_(input, /*non_blocking=*/true);
    }
    const auto promise = std::make_shared<Promise>();
    const Launched copied_back = promise->get_future().share();
    thread_.run([=, this, copied = record(stream_), text = std::string(label)] {
      try {
        const at::NoGradGuard no_grad_here;
        copied->synchronize();
        run_finish([=, this, work = collective(*on_host_, to, from, text)] { finish(work, input, output, to, *promise); });
      } catch (...) {
        promise->set_exception(std::current_exception());
      }
    });
    return coalesced_.note(Work(std::make_shared<StagedWork>(copied_back, device_)));
  }

  /// Holds `input` and the copies until the device has done with them.
  void finish(Work work, const at::Tensor& /*input*/, const at::Tensor& output, const at::Tensor& copy, Promise& promise) const {
    std::shared_ptr<c10::Event> end;
    try {
      const OutputGuard guard(output);
      work.wait();
      const c10::StreamGuard on_stream(stream_);
      if (output.defined()) output.copy_(copy, /*non_blocking=*/true);
      end = record(stream_);
    } catch (...) {
      return promise.set_exception(std::current_exception());
    }
    promise.set_value(end);
    try {
      end->synchronize();
    } catch (...) { // an error of the device, which the program's next call of it tells
    }
  }

  CommunicatorPtr on_host_;
  c10::Device device_;
  c10::Stream stream_;
  CoalescedCalls coalesced_;
  std::map<Direction, TaskThread> messages_; // of `thread_` alone, which starts each at its first message; outlive it
  TaskThread thread_;                        // ends first
};

} // namespace

CommunicatorPtr make_staged_communicator(CommunicatorPtr on_host, c10::Device device) {
  return std::make_shared<StagedCommunicator>(std::move(on_host), device);
}

} // namespace tessera::internal
