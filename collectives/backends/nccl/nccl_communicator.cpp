#include <tessera/collectives/backends/nccl/nccl_communicator.h>

#include <tessera/base/error_text.h>
#include <tessera/base/forks.h>
#include <tessera/collectives/backends/gloo/channel.h>
#include <tessera/collectives/backends/gloo/exchange.h>
#include <tessera/collectives/backends/nccl/open_groups.h>
#include <tessera/collectives/calls/checked_communicator.h>
#include <tessera/collectives/calls/checks.h>
#include <tessera/collectives/calls/signature.h>
#include <tessera/collectives/ranks/group_store.h>
#include <tessera/collectives/ranks/job_environment.h>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal::nccl {

namespace {

c10d::ReduceOp::RedOpType to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg: return c10d::ReduceOp::AVG;
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct: return c10d::ReduceOp::PRODUCT;
  }
  TORCH_INTERNAL_ASSERT(false);
}

// c10d sends these dtypes; all others travel as bytes.
bool is_sent_as_it_is(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kLong:
    case at::kInt:
    case at::kChar:
    case at::kByte:
    case at::kBool: return true;
    default: return false;
  }
}

at::Tensor for_sending(const at::Tensor& tensor) {
  auto flat = tensor.view({-1});
  return is_sent_as_it_is(tensor.scalar_type()) ? flat : flat.view(at::kByte);
}

bool waits_block_host() {
  static const bool blocks = c10d::getCvarBool(c10d::TORCH_NCCL_BLOCKING_WAIT, false);
  return blocks;
}

class NcclWork final : public WorkState {
 public:
  NcclWork(c10::intrusive_ptr<c10d::Work> work, std::string call) : work_(std::move(work)), call_(std::move(call)) {}
  void wait() override {
    try {
      work_->wait();
    } catch (const std::exception& error) {
      C10_THROW_ERROR(DistBackendError, c10::str(call_, " failed: ", error_text(error)));
    }
  }
  bool is_completed() override { return work_->isCompleted(); }
  bool blocks_host() const override { return waits_block_host(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::string call_;
};

// After an error c10d's watchdog sleeps four times as long as this says, so that all ranks can write c10d's flight recorder, and
// whoever ends the process waits for it: a minute. A second is what a program gets that has not asked for the recorder.
void shorten_wait_for_flight_recorder() {
  static const bool records = c10d::getCvarInt({"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}, 0) > 0;
  static const int set = records ? 0 : setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250", /*overwrite=*/0);
  TORCH_CHECK(set == 0, "cannot set TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC in the environment");
}

/// Each collective runs on the process group's own stream, after what the current stream holds, or on the current one;
/// `Work::wait` makes the current stream wait for it. c10d keeps the tensors alive until then, without record_stream.
class NcclCommunicator final : public CheckedCommunicator {
 public:
  NcclCommunicator(const GroupDescription& group, int device, CudaBuffers buffers)
      : CheckedCommunicator(group.name, group.ranks, group.rank, at::kCUDA),
        device_(at::kCUDA, static_cast<c10::DeviceIndex>(device)),
        buffers_(buffers),
        watch_(group.watch) {
    c10::cuda::set_device(device_.index());
    shorten_wait_for_flight_recorder();
    auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
    options->timeout = group.options.timeout;
    options->group_name = group.name;
    options->global_ranks_in_group.assign(group.ranks.begin(), group.ranks.end());
    group_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(group.store, group.rank, static_cast<int>(group.ranks.size()), options);
    group_->setBoundDeviceId(device_);
    // NCCL connects here and not at the first collective: that may come on autograd's thread, beside another communicator's
    // collective in flight.
    group_->eagerConnectSingleDevice(device_);
    TORCH_CHECK(buffers_ == CudaBuffers::kCaching || group_->supportsTensorAlloc(device_.index()),
                "TESSERA_CUDA_BUFFERS=registered: NCCL has no memory of its own on ", device_, " of rank ",
                group.ranks[static_cast<size_t>(group.rank)]);
    if (checks_collectives_over_nccl(current_environment())) signatures_ = make_signature_channel(group);
    OpenGroups::instance().add(group_.get(), group); // last: what throws here has no destructor that removes it
  }

  ~NcclCommunicator() override {
    if (is_forked_copy()) { // it is the parent's
      group_.release();
      return;
    }
    if (signatures_) signatures_->close();
    if (!OpenGroups::instance().remove(group_.get())) { // aborted: the process ends, and does not wait for c10d's threads
      group_.release();
      return;
    }
    try {
      // `shutdown` waits for the peers: not while an error unwinds, and not where one of them is gone.
      if (std::uncaught_exceptions() > 0 || gave_up_ || watch_->find_missing(ranks()))
        group_->abort();
      else
        group_->shutdown();
    } catch (...) { // an error of a collective that nobody waited for
    }
  }

  // NCCL multiplies by the inverse of the count before it adds.
  bool averages(at::ScalarType dtype) const override { return dtype != at::kHalf; }
  // Halves are not scaled, for the same reason. Nor bf16, for which c10d 2.11 hands NCCL a float as the factor, which it reads as
  // 0 or a tiny number (PyTorch's issue 190745).
  bool scales(at::ScalarType dtype) const override { return dtype == at::kFloat || dtype == at::kDouble; }

  // Two ranks that send to each other do so inside it: kernels of one pair run one after another.
  Work coalesced(const std::function<void()>& issue) override {
    TORCH_CHECK(!coalescing_, "coalesced calls on group ", name(), " do not nest");
    check_not_forked(name());
    const c10::cuda::CUDAGuard guard(device_.index());
    group_->startCoalescing();
    coalescing_ = true;
    try {
      issue();
    } catch (...) {
      coalescing_ = false;
      group_->endCoalescing();
      throw;
    }
    coalescing_ = false;
    auto work = group_->endCoalescing();
    return work ? Work(std::make_shared<NcclWork>(std::move(work), c10::str("coalesced collectives of group ", name()))) : Work();
  }

  /// Without a launch: a kernel that differs from the others' would hang the device, or take part in what they wait for.
  void give_up(std::string_view cause) override {
    const auto kind = CollectiveKind::kAllGather;
    if (signatures_)
      return compare(make_signature(kind, cause, at::kByte, 1), gloo::ExchangePlan(size()), describe(*this, kind, cause));
    if (gave_up_ || is_forked_copy()) return;
    cause_ = cause;
    gave_up_ = true;
    group_->abort();
  }

  /// Not where waits block the host: only they have a time limit then, and c10d gives none for what is on the current stream.
  void run_on_current_stream() override { has_own_stream_ = waits_block_host(); }

  /// NCCL's own memory, registered with it, where the environment asks for that: its kernels then read and write it where it
  /// lies.
  c10::DataPtr allocate(int64_t bytes) override {
    if (buffers_ == CudaBuffers::kCaching) return Communicator::allocate(bytes);
    auto memory = std::make_unique<at::Tensor>(group_->allocateTensor(bytes, at::TensorOptions(device_).dtype(at::kByte)));
    void* data = memory->mutable_data_ptr();
    return {data, memory.release(), [](void* tensor) { delete static_cast<at::Tensor*>(tensor); }, device_};
  }

 private:
  Work start(CollectiveCall&& call) override {
    const auto text = describe(*this, call);
    check_not_forked(text);
    const c10::cuda::CUDAGuard guard(device_.index()); // a thread of the program's has device 0, on which nothing shall be done
    TORCH_CHECK_WITH(DistBackendError, !gave_up_, text,
                     ": this rank has left the group, in which it could not join a collective: ", cause_);
    check_not_captured(text);
    if (signatures_) compare_signatures(call, text);
    // Ranks may differ in what they send in an all_to_all, in nothing else.
    if (call.bytes() == 0 && call.kind != CollectiveKind::kAllToAll && call.kind != CollectiveKind::kBarrier) return {};
    c10::intrusive_ptr<c10d::Work> work;
    try {
      work = launch(call);
    } catch (const std::exception& error) {
      C10_THROW_ERROR(DistBackendError, c10::str(text, " failed: ", error_text(error)));
    }
    return work ? Work(std::make_shared<NcclWork>(std::move(work), text)) : Work(); // none while coalescing
  }

  c10::intrusive_ptr<c10d::Work> launch(const CollectiveCall& call) {
    switch (call.kind) {
      case CollectiveKind::kAllGather: {
        auto to = for_sending(call.output), from = for_sending(call.input);
        return group_->_allgather_base(to, from, options_for<c10d::AllgatherOptions>());
      }
      case CollectiveKind::kReduceScatter: {
        auto to = call.output.view({-1}), from = call.input.view({-1});
        auto options = options_for<c10d::ReduceScatterOptions>();
        options.reduceOp = call.factor ? c10d::makeNCCLPreMulSum(*call.factor) : c10d::ReduceOp(to_c10d(call.op));
        return group_->_reduce_scatter_base(to, from, options);
      }
      case CollectiveKind::kAllReduce: {
        std::vector<at::Tensor> tensors{call.output};
        auto options = options_for<c10d::AllreduceOptions>();
        options.reduceOp = to_c10d(call.op);
        return group_->allreduce(tensors, options);
      }
      case CollectiveKind::kAllToAll: return launch_all_to_all(call);
      case CollectiveKind::kBarrier: {
        c10d::BarrierOptions options;
        options.device = device_;
        return group_->barrier(options); // whose wait blocks the host
      }
      default: return launch_from_one(call);
    }
  }

  c10::intrusive_ptr<c10d::Work> launch_all_to_all(const CollectiveCall& call) {
    auto to = for_sending(call.output), from = for_sending(call.input);
    const auto dtype = call.input.scalar_type();
    const auto width = is_sent_as_it_is(dtype) ? 1 : static_cast<int64_t>(call.input.element_size());
    auto splits = call.splits;
    for (auto* list : {&splits.output, &splits.input})
      for (auto& split : *list) split *= width;
    return group_->alltoall_base(to, from, splits.output, splits.input, options_for<c10d::AllToAllOptions>());
  }

  c10::intrusive_ptr<c10d::Work> launch_from_one(const CollectiveCall& call) {
    std::vector<at::Tensor> tensors{for_sending(call.full())};
    if (call.kind == CollectiveKind::kSend) return group_->send(tensors, call.peer, /*tag=*/0);
    if (call.kind == CollectiveKind::kReceive) return group_->recv(tensors, call.peer, /*tag=*/0);
    auto options = options_for<c10d::BroadcastOptions>();
    options.rootRank = call.peer;
    return group_->broadcast(tensors, options);
  }

  template <typename Options>
  Options options_for() const {
    Options options;
    options.asyncOp = has_own_stream_;
    return options;
  }

  bool is_forked_copy() const { return fork_depth() != fork_depth_; }
  void check_not_forked(const std::string& text) const {
    TORCH_CHECK(!is_forked_copy(), text, ": this process was forked from a rank and has no part in its groups");
  }

  // A graph would repeat the kernels, but not what the host does around them: which group is open, and where its memory lies.
  static void check_not_captured(const std::string& text) {
    TORCH_CHECK(
        c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None, text,
        ": a CUDA graph is being captured on this stream, and the steps of a sharded model cannot be: end the capture before "
        "the collective");
  }

  // Before the launch: a mismatched kernel would hang the device. Not of messages in `coalesced`: two ranks that send to each
  // other would wait for each other.
  void compare_signatures(const CollectiveCall& call, const std::string& text) {
    gloo::ExchangePlan plan(size());
    if (call.kind == CollectiveKind::kSend) plan.direction = {rank(), call.peer};
    if (call.kind == CollectiveKind::kReceive) plan.direction = {call.peer, rank()};
    if (plan.direction && coalescing_) return;
    if (call.kind == CollectiveKind::kAllToAll)
      plan.counts = call.splits.byte_counts(static_cast<int64_t>(call.input.element_size()));
    compare(call.signature(), std::move(plan), text);
  }

  void compare(const Signature& signature, gloo::ExchangePlan plan, const std::string& text) {
    auto exchange = std::make_shared<gloo::Exchange>(signatures_, text);
    exchange->start(signature, std::move(plan));
    exchange->wait();
  }

  static std::shared_ptr<gloo::Channel> make_signature_channel(const GroupDescription& group) {
    const gloo::ChannelOptions options{group.options.timeout, true, group.all_local(), group.ranks, group.watch};
    return gloo::Channel::connect(c10::make_intrusive<GroupStore>("signatures", group.store, group.ranks, group.watch),
                                  group.rank, static_cast<int>(group.ranks.size()), options);
  }

  at::Device device_;
  CudaBuffers buffers_;
  std::shared_ptr<RankWatch> watch_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> group_;
  std::shared_ptr<gloo::Channel> signatures_;
  const int fork_depth_ = fork_depth();
  bool coalescing_ = false;
  bool has_own_stream_ = true;
  std::string cause_; ///< why this rank has given up; read by those alone who see `gave_up_`
  std::atomic<bool> gave_up_ = false;
};

} // namespace

CommunicatorPtr make_nccl_communicator(const GroupDescription& group, int device, CudaBuffers buffers) {
  return std::make_shared<NcclCommunicator>(group, device, buffers);
}

} // namespace tessera::internal::nccl
