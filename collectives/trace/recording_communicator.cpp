#include <tessera/collectives/trace/recording_communicator.h>

#include <tessera/base/error_text.h>
#include <tessera/collectives/calls/call_communicator.h>

#include <c10/util/ScopeExit.h>

#include <atomic>
#include <thread>
#include <utility>

namespace tessera::internal {

namespace {

/// Of one call, or of those of `coalesced`.
class RecordedWork final : public WorkState {
 public:
  RecordedWork(Work work, std::shared_ptr<JobTrace> trace, uint64_t number, std::vector<uint64_t> others = {})
      : work_(std::move(work)), trace_(std::move(trace)), number_(number), others_(std::move(others)) {}

  void wait() override {
    auto& recorder = trace_->recorder();
    for_each([&](uint64_t number) { recorder.await(number); });
    try {
      auto work = work_; // a copy, because `wait` resets the handle and other threads read this one
      work.wait();
    } catch (const std::exception& error) {
      for_each([&, text = error_text(error)](uint64_t number) { trace_->fail(number, text); });
      throw;
    }
    for_each([&](uint64_t number) { recorder.end(number); });
  }
  bool is_completed() override {
    if (!work_.is_completed()) return false;
    for_each([&](uint64_t number) { trace_->recorder().end(number); });
    return true;
  }
  bool blocks_host() const override { return work_.blocks_host(); }

 private:
  template <typename Function>
  void for_each(const Function& function) const {
    function(number_);
    for (const auto number : others_) function(number);
  }

  const Work work_;
  const std::shared_ptr<JobTrace> trace_;
  const uint64_t number_;
  const std::vector<uint64_t> others_;
};

/// Forwards every call to another communicator of the same ranks, which does the work.
class RecordingCommunicator final : public CallCommunicator {
 public:
  RecordingCommunicator(CommunicatorPtr inner, std::shared_ptr<JobTrace> trace, int group)
      : CallCommunicator(inner->name(), inner->ranks(), inner->rank(), inner->device_type()),
        inner_(std::move(inner)),
        takes_calls_(dynamic_cast<CallCommunicator*>(inner_.get())),
        trace_(std::move(trace)),
        group_(group) {}

  bool averages(at::ScalarType dtype) const override { return inner_->averages(dtype); }
  bool scales(at::ScalarType dtype) const override { return inner_->scales(dtype); }

  void give_up(std::string_view cause) override {
    const auto number = trace_->recorder().issue({.group = group_, .kind = CollectiveKind::kAllGather, .label = cause});
    trace_->refuse(number, std::string(cause));
    inner_->give_up(cause);
  }
  void close() override { inner_->close(); }
  void end() override { takes_calls_ ? takes_calls_->end() : inner_->close(); }

  c10::DataPtr allocate(int64_t bytes) override { return inner_->allocate(bytes); }
  void run_on_current_stream() override { inner_->run_on_current_stream(); }
  CollectiveCounters& counters() override { return inner_->counters(); }

  /// The calls that `issue` makes end together.
  Work coalesced(const std::function<void()>& issue) override {
    std::vector<uint64_t> numbers;
    auto work = inner_->coalesced([&] {
      coalescing_thread_ = std::this_thread::get_id();
      const auto end = c10::make_scope_exit([&] {
        numbers = std::exchange(coalesced_, {});
        coalescing_thread_ = std::thread::id(); // another may come now
      });
      issue();
    });
    if (numbers.empty()) return work;
    const auto first = numbers.back();
    numbers.pop_back();
    return Work(std::make_shared<RecordedWork>(std::move(work), trace_, first, std::move(numbers)));
  }

  void barrier(std::string_view label) override {
    const auto number = trace_->recorder().issue({.group = group_, .kind = CollectiveKind::kBarrier, .label = label});
    trace_->recorder().await(number);
    try {
      inner_->barrier(label);
    } catch (const std::exception& error) {
      trace_->fail(number, error_text(error));
      throw;
    }
    trace_->recorder().end(number);
  }

  Work run(CollectiveCall&& call) override {
    const auto number =
        trace_->recorder().issue({group_, call.kind, call.label, call.full().scalar_type(), call.bytes(), call.op, call.peer});
    try {
      auto work = takes_calls_ ? takes_calls_->run(std::move(call)) : call.issue_on(*inner_);
      if (coalescing_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id()) {
        coalesced_.push_back(number);
        return work;
      }
      return Work(std::make_shared<RecordedWork>(std::move(work), trace_, number));
    } catch (const std::exception& error) {
      trace_->refuse(number, error_text(error));
      throw;
    }
  }

 private:
  CommunicatorPtr inner_;
  CallCommunicator* takes_calls_; // the same, where it does
  std::shared_ptr<JobTrace> trace_;
  int group_;
  std::atomic<std::thread::id> coalescing_thread_{}; // the one that runs `coalesced`
  std::vector<uint64_t> coalesced_;                  // what it called
};

} // namespace

CommunicatorPtr make_recorded(std::shared_ptr<JobTrace> trace, RecordedGroup group,
                              const std::function<CommunicatorPtr()>& connect) {
  auto& recorder = trace->recorder();
  const int index = recorder.add_group(std::move(group));
  const auto number = recorder.connect(index);
  try {
    auto inner = connect();
    recorder.end(number);
    return std::make_shared<RecordingCommunicator>(std::move(inner), std::move(trace), index);
  } catch (const std::exception& error) {
    trace->fail(number, error_text(error));
    throw;
  }
}

} // namespace tessera::internal
