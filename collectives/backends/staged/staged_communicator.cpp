#include <tessera/collectives/backends/staged/staged_communicator.h>

#include <tessera/base/current_stream.h>
#include <tessera/base/output_guard.h>
#include <tessera/collectives/backends/staged/task_thread.h>
#include <tessera/collectives/calls/checked_communicator.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

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

class StagedCommunicator final : public CheckedCommunicator {
 public:
  StagedCommunicator(CommunicatorPtr on_host, c10::Device device)
      : CheckedCommunicator(on_host->name(), on_host->ranks(), on_host->rank(), device.type()),
        on_host_(std::move(on_host)),
        device_(device),
        stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}
  /// The threads come to their end, whatever they wait for.
  ~StagedCommunicator() override { end(); }
  StagedCommunicator(const StagedCommunicator&) = delete;
  StagedCommunicator& operator=(const StagedCommunicator&) = delete;

  void give_up(std::string_view cause) override {
    run_and_wait([&] { on_host_->give_up(cause); });
  }

  void close() override { on_host_->close(); }
  void end() final {
    auto* const on_host = dynamic_cast<CallCommunicator*>(on_host_.get());
    on_host ? on_host->end() : on_host_->close();
  }

 private:
  using Promise = std::promise<std::shared_ptr<c10::Event>>;
  using Direction = std::pair<CollectiveKind, int>; // with the peer

  Work start(CollectiveCall&& call) override {
    if (call.kind == CollectiveKind::kBarrier) {
      run_and_wait([&] { on_host_->barrier(call.label); });
      return {};
    }
    auto on_host = copy_to_host(call);
    const auto promise = std::make_shared<Promise>();
    const Launched copied_back = promise->get_future().share();
    thread_.run([=, this, copied = record(stream_), text = std::string(call.label)]() mutable {
      try {
        const at::NoGradGuard no_grad;
        copied->synchronize();
        on_host.label = text;
        run_finish(call, [=, this, work = on_host.issue_on(*on_host_)] { finish(work, call, on_host.output, *promise); });
      } catch (...) {
        promise->set_exception(std::current_exception());
      }
    });
    return Work(std::make_shared<StagedWork>(copied_back, device_));
  }

  /// The call with tensors of the host. Where its input is its output, so are they.
  CollectiveCall copy_to_host(const CollectiveCall& call) {
    const auto &input = call.input, &output = call.output;
    const c10::InferenceMode training(false); // they are written by a thread that knows nothing of the caller's mode
    const at::NoGradGuard no_grad;
    auto on_host = call;
    if (input.defined()) on_host.input = host_tensor_like(input);
    if (output.defined()) on_host.output = output.is_same(input) ? on_host.input : host_tensor_like(output);
    record(current_stream(device_))->block(stream_);
    if (input.defined()) {
      const c10::StreamGuard guard(stream_);
      const at::DisableRecordFunctionGuard no_record; // as no other transport shows an operator that reads a buffer's gaps
      on_host.input.copy_(input, /*non_blocking=*/true);
    }
    return on_host;
  }

  /// `function` of the host alone, after the calls before it.
  template <typename Function>
  void run_and_wait(const Function& function) {
    std::promise<void> done;
    auto ended = done.get_future();
    thread_.run([&] {
      try {
        function();
        done.set_value();
      } catch (...) {
        done.set_exception(std::current_exception());
      }
    });
    ended.get();
  }

  /// A message waits apart, because the other side's may depend on a call that follows here: of its direction to or from its
  /// peer, where messages keep their order, on none.
  template <typename Finish>
  void run_finish(const CollectiveCall& call, const Finish& finish) {
    if (call.kind == CollectiveKind::kSend || call.kind == CollectiveKind::kReceive)
      messages_[{call.kind, call.peer}].run(finish);
    else
      finish();
  }

  /// Whoever runs it holds the tensors of `call` and the copies until the device has done with them.
  void finish(Work work, const CollectiveCall& call, const at::Tensor& copy, Promise& promise) const {
    const auto& output = call.output;
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
  std::map<Direction, TaskThread> messages_; // of `thread_` alone, which starts each at its first message; outlive it
  TaskThread thread_;                        // ends first
};

} // namespace

CommunicatorPtr make_staged_communicator(CommunicatorPtr on_host, c10::Device device) {
  return std::make_shared<StagedCommunicator>(std::move(on_host), device);
}

} // namespace tessera::internal
