#include <tessera/collectives/backends/hierarchical/hierarchical_communicator.h>

#include <tessera/base/background_scheduling.h>
#include <tessera/base/forks.h>
#include <tessera/collectives/backends/gloo/gloo_communicator.h>
#include <tessera/collectives/calls/checks.h>

#include <c10/util/Exception.h>

#include <utility>

namespace tessera::internal::hierarchical {

namespace {

// Up to this size (bytes) of the full buffer one exchange of all ranks is as fast.
constexpr int64_t kFlatBytes = 64 << 10;

/// The user's handle of a call.
class CallWork final : public WorkState {
 public:
  CallWork(std::shared_ptr<const Links> links, std::shared_ptr<Call> call) : links_(std::move(links)), call_(std::move(call)) {}
  ~CallWork() override {
    if (links_->all->is_forked_copy()) leave_to_parent(std::move(call_));
  }
  CallWork(const CallWork&) = delete;
  CallWork& operator=(const CallWork&) = delete;

  void wait() override {
    links_->all->check_not_forked("a collective that was started before a fork");
    call_->wait();
  }
  bool is_completed() override { return call_->is_completed(); }

 private:
  std::shared_ptr<const Links> links_;
  std::shared_ptr<Call> call_;
};

char* data_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }
int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

} // namespace

HierarchicalCommunicator::HierarchicalCommunicator(std::string name, RankList ranks, int rank, std::shared_ptr<const Links> links,
                                                   CommunicatorPtr inside)
    : CheckedCommunicator(std::move(name), std::move(ranks), rank, at::kCPU),
      links_(std::move(links)),
      flat_(std::make_shared<gloo::GlooCommunicator>(this->name(), rank_list(), this->rank(), links_->all)),
      inside_(std::move(inside)),
      staging_(links_->arena) {
  const BackgroundScheduling of_the_thread;
  thread_ = std::make_unique<TaskThread>();
}

HierarchicalCommunicator::~HierarchicalCommunicator() { links_->close(); }

Work HierarchicalCommunicator::start(CollectiveCall&& call) {
  switch (call.kind) {
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kBarrier: return call.issue_on(*flat_);
    case CollectiveKind::kSend:
    case CollectiveKind::kReceive: {
      const auto [host, column] = links_->layout.find(call.peer);
      if (host != links_->layout.host) return call.issue_on(*flat_);
      call.peer = column;
      return call.issue_on(*inside_);
    }
    default: return call.bytes() <= kFlatBytes ? call.issue_on(*flat_) : take_steps(call);
  }
}

Work HierarchicalCommunicator::take_steps(const CollectiveCall& call) {
  auto taken = std::make_shared<Call>(
      links_,
      Call::Subject{describe(*this, call), call.kind, std::string(call.label), call.signature(), {call.output, call.input}});
  taken->announce();
  thread_->run([taken, steps = steps_of(call)] { taken->run(steps); });
  return Work(std::make_shared<CallWork>(links_, std::move(taken)));
}

HierarchicalCommunicator::Steps HierarchicalCommunicator::steps_of(const CollectiveCall& call) {
  auto *const to = data_of(call.output), *const from = data_of(call.input);
  const auto output_bytes = bytes_of(call.output), input_bytes = bytes_of(call.input);
  const Reduction reduction{call.input.scalar_type(), call.op};
  switch (call.kind) {
    case CollectiveKind::kAllGather: return [=](Call& taken) { hierarchical::all_gather(taken, to, from, input_bytes); };
    case CollectiveKind::kReduceScatter:
      return [=, this](Call& taken) { hierarchical::reduce_scatter(taken, staging_, to, from, output_bytes, reduction); };
    case CollectiveKind::kAllReduce:
      return [=, this](Call& taken) { hierarchical::all_reduce(taken, staging_, to, output_bytes, reduction); };
    case CollectiveKind::kBroadcast:
      return [=, root = call.peer](Call& taken) { hierarchical::broadcast(taken, to, output_bytes, root); };
    default: TORCH_INTERNAL_ASSERT(false);
  }
}

void HierarchicalCommunicator::give_up(std::string_view cause) {
  if (links_->all->options().check_signatures) return Communicator::give_up(cause);
  links_->disconnect(std::string(cause));
}

c10::DataPtr HierarchicalCommunicator::allocate(int64_t bytes) { return inside_->allocate(bytes); }

} // namespace tessera::internal::hierarchical
