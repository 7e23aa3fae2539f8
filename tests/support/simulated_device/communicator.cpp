#include <tessera/tests/support/simulated_device/communicator.h>

#include <tessera/collectives/calls/checked_communicator.h>
#include <tessera/collectives/calls/checks.h>
#include <tessera/tests/support/simulated_device/boxed.h>
#include <tessera/tests/support/simulated_device/caching_allocator.h>
#include <tessera/tests/support/simulated_device/runtime.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing::sim {

namespace {

CommunicatorFaults faults; // set by tests between steps, by the thread that launches

at::Tensor cpu_alias(const at::Tensor& tensor) { return Aliases(c10::kCPU).of(tensor); }

size_t make_stream(const internal::GroupDescription& group) {
  const auto stream = Runtime::get().make_stream();
  Runtime::get().name_stream(stream, c10::str("group ", group.name, " [", c10::Join(", ", group.ranks), "]"));
  return stream;
}

/// A collective in flight.
class SimulatedWork final : public WorkState {
 public:
  SimulatedWork(CollectiveKind kind, size_t stream, std::vector<at::Tensor> kept)
      : kind_(kind), done_(Runtime::get().record(stream)), kept_(std::move(kept)) {}

  /// Nobody waited: the memory stays until the collective is done.
  ~SimulatedWork() override {
    for (const auto& tensor : kept_) CachingAllocator::get().record_stream(tensor.storage().data(), done_.position.stream);
  }

  void wait() override {
    if (faults.skip_wait != kind_) Runtime::get().make_wait(current_stream(), done_);
    kept_.clear();
  }

  bool is_completed() override { return Runtime::get().query(done_); }
  bool blocks_host() const override { return false; }

 private:
  CollectiveKind kind_;
  Mark done_;
  std::vector<at::Tensor> kept_;
};

class SimulatedCommunicator final : public internal::CheckedCommunicator {
 public:
  explicit SimulatedCommunicator(const internal::GroupDescription& group)
      : CheckedCommunicator(group.name, group.ranks, group.rank, kDeviceType),
        gloo_(internal::make_backend_communicator(group, at::kCPU)),
        stream_(make_stream(group)) {}

  ~SimulatedCommunicator() override {
    try {
      Runtime::get().synchronize(stream_, "communicator's end"); // its work uses `gloo_`
    } catch (const std::exception&) {                            // of a collective that nobody waited for
    }
  }

  bool averages(at::ScalarType dtype) const override { return dtype != at::kHalf; }
  bool scales(at::ScalarType dtype) const override { return dtype == at::kFloat || dtype == at::kDouble; }

  Work coalesced(const std::function<void()>& issue) override {
    TORCH_CHECK(!coalescing_, "coalesced calls on group ", name(), " do not nest");
    coalescing_ = true;
    try {
      issue();
    } catch (...) {
      coalescing_ = false;
      coalesced_.clear();
      throw;
    }
    coalescing_ = false;
    // In order after what was issued.
    return Work(
        std::make_shared<SimulatedWork>(CollectiveKind::kBarrier, own_or_current_stream(), std::exchange(coalesced_, {})));
  }

  void give_up(std::string_view cause) override {
    launch({.kind = CollectiveKind::kAllGather, .label = cause}, [this, text = std::string(cause)] {
      try {
        gloo_->give_up(text);
      } catch (const std::exception&) { // which the other ranks have
      }
    });
  }

  void run_on_current_stream() override { has_own_stream_ = false; }

 private:
  using Call = internal::CollectiveCall;

  Work start(Call&& call) override {
    const bool is_message = call.kind == CollectiveKind::kSend || call.kind == CollectiveKind::kReceive;
    TORCH_CHECK_NOT_IMPLEMENTED(!is_message, internal::describe(*this, call), ": no messages between two ranks here");
    auto on_cpu = call;
    if (call.output.defined()) on_cpu.output = cpu_alias(call.output);
    if (call.input.defined()) on_cpu.input = cpu_alias(call.input);
    auto work = launch(call, [this, on_cpu, label = std::string(call.label)]() mutable {
      on_cpu.label = label;
      exchange(on_cpu).wait();
    });
    if (call.kind != CollectiveKind::kBarrier) return work;
    Runtime::get().synchronize(stream_, "barrier");
    return {};
  }

  /// As NCCL averages halves: each is divided, and rounded, before it is added.
  Work exchange(Call call) const {
    if (call.factor) call.input.mul_(*std::exchange(call.factor, std::nullopt));
    if (call.op == ReduceOp::kAvg && !averages(call.input.scalar_type())) {
      call.input.div_(size());
      call.op = ReduceOp::kSum;
    }
    return call.issue_on(*gloo_);
  }

  Work launch(const Call& call, std::function<void()> action) {
    auto& runtime = Runtime::get();
    const auto stream = own_or_current_stream();
    if (faults.skip_start != call.kind) runtime.make_wait(stream, runtime.record(current_stream()));
    runtime.make_follow(stream, last_); // one at a time, in the order of the calls, whatever their streams: as NCCL does
    std::vector<Use> uses;
    std::vector<at::Tensor> kept;
    const auto use = [&](const at::Tensor& tensor, bool is_written) {
      uses.push_back({Region::of(tensor), is_written});
      if (!faults.releases_early) kept.push_back(tensor);
    };
    if (call.input.defined() && !call.input.is_same(call.output)) use(call.input, internal::reduces(call.kind));
    if (call.output.defined()) use(call.output, call.kind != CollectiveKind::kBroadcast || call.peer != rank());
    runtime.launch(stream, {c10::str(to_string(call.kind), " '", call.label, "'"), std::move(uses), std::move(action),
                            runtime.time_line().collective_us(call.bytes()), 1, Stream::Start::kNow}); // other ranks wait for it
    last_ = runtime.record(stream);
    if (coalescing_) {
      coalesced_.insert(coalesced_.end(), kept.begin(), kept.end());
      return {};
    }
    return Work(std::make_shared<SimulatedWork>(call.kind, stream, std::move(kept)));
  }

  size_t own_or_current_stream() const { return has_own_stream_ || faults.keeps_own_stream ? stream_ : current_stream(); }

  CommunicatorPtr gloo_;
  size_t stream_;
  Mark last_; ///< the end of the last collective
  bool has_own_stream_ = true;
  bool coalescing_ = false;
  std::vector<at::Tensor> coalesced_; // what its calls keep
};

} // namespace

CommunicatorPtr make_communicator(const internal::GroupDescription& group) {
  return std::make_shared<SimulatedCommunicator>(group);
}

void set_communicator_faults(const CommunicatorFaults& made) { faults = made; }

} // namespace tessera::testing::sim
