#include <tessera/collectives/hierarchical/hierarchical_communicator.h>

#include <tessera/collectives/background_scheduling.h>
#include <tessera/collectives/checks.h>
#include <tessera/collectives/forks.h>
#include <tessera/collectives/gloo/gloo_communicator.h>

#include <algorithm>
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
    : Communicator(std::move(name), std::move(ranks), rank, at::kCPU),
      links_(std::move(links)),
      flat_(std::make_shared<gloo::GlooCommunicator>(this->name(), rank_list(), this->rank(), links_->all)),
      inside_(std::move(inside)),
      staging_(links_->arena) {
  const BackgroundScheduling of_the_thread;
  thread_ = std::make_unique<TaskThread>();
}

HierarchicalCommunicator::~HierarchicalCommunicator() { links_->close(); }

Work HierarchicalCommunicator::note(CollectiveKind kind, int64_t bytes, Work work) {
  counters_.add(kind, bytes);
  return coalesced_.note(std::move(work));
}

Work HierarchicalCommunicator::start(Signature signature, std::string_view label, std::vector<at::Tensor> tensors, Steps steps) {
  const auto kind = static_cast<CollectiveKind>(signature.kind);
  const auto bytes = signature.bytes;
  auto call = std::make_shared<Call>(
      links_, Call::Subject{describe(*this, kind, label), kind, std::string(label), signature, std::move(tensors)});
  call->announce();
  thread_->run([call, steps = std::move(steps)] { call->run(steps); });
  return note(kind, bytes, Work(std::make_shared<CallWork>(links_, std::move(call))));
}

Work HierarchicalCommunicator::all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) {
  check_all_gather(*this, output, input, label);
  const auto kind = CollectiveKind::kAllGather;
  if (bytes_of(output) <= kFlatBytes) return note(kind, bytes_of(output), flat_->all_gather_into(output, input, label));
  const auto signature = make_signature(kind, label, input.scalar_type(), bytes_of(output));
  return start(
      signature, label, {output, input},
      [to = data_of(output), from = data_of(input), bytes = bytes_of(input)](Call& call) { all_gather(call, to, from, bytes); });
}

Work HierarchicalCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                              std::string_view label) {
  check_reduce_scatter(*this, output, input, op, label);
  const auto kind = CollectiveKind::kReduceScatter;
  if (bytes_of(input) <= kFlatBytes) return note(kind, bytes_of(input), flat_->reduce_scatter(output, input, op, label));
  const Reduction reduction{input.scalar_type(), op};
  return start(make_signature(kind, label, reduction.dtype, bytes_of(input), op), label, {output, input},
               [=, this, to = data_of(output), from = data_of(input), bytes = bytes_of(output)](Call& call) {
                 hierarchical::reduce_scatter(call, staging_, to, from, bytes, reduction);
               });
}

Work HierarchicalCommunicator::all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) {
  check_all_reduce(*this, tensor, op, label);
  const auto kind = CollectiveKind::kAllReduce;
  if (bytes_of(tensor) <= kFlatBytes) return note(kind, bytes_of(tensor), flat_->all_reduce(tensor, op, label));
  const Reduction reduction{tensor.scalar_type(), op};
  return start(make_signature(kind, label, reduction.dtype, bytes_of(tensor), op), label, {tensor},
               [=, this, data = data_of(tensor), bytes = bytes_of(tensor)](Call& call) {
                 hierarchical::all_reduce(call, staging_, data, bytes, reduction);
               });
}

Work HierarchicalCommunicator::all_to_all(const at::Tensor& output, const at::Tensor& input,
                                          const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
                                          std::string_view label) {
  auto work = flat_->all_to_all(output, input, output_splits, input_splits, label);
  return note(CollectiveKind::kAllToAll, std::max(bytes_of(output), bytes_of(input)), std::move(work));
}

Work HierarchicalCommunicator::broadcast(const at::Tensor& tensor, int root, std::string_view label) {
  check_broadcast(*this, tensor, root, label);
  const auto kind = CollectiveKind::kBroadcast;
  if (bytes_of(tensor) <= kFlatBytes) return note(kind, bytes_of(tensor), flat_->broadcast(tensor, root, label));
  const auto signature = make_signature(kind, label, tensor.scalar_type(), bytes_of(tensor), ReduceOp::kSum, root);
  return start(signature, label, {tensor}, [root, data = data_of(tensor), bytes = bytes_of(tensor)](Call& call) {
    hierarchical::broadcast(call, data, bytes, root);
  });
}

Work HierarchicalCommunicator::send(const at::Tensor& tensor, int to, std::string_view label) {
  check_send(*this, tensor, to, label);
  const auto [host, column] = links_->layout.find(to);
  auto work = host == links_->layout.host ? inside_->send(tensor, column, label) : flat_->send(tensor, to, label);
  return note(CollectiveKind::kSend, bytes_of(tensor), std::move(work));
}

Work HierarchicalCommunicator::receive(const at::Tensor& tensor, int from, std::string_view label) {
  check_receive(*this, tensor, from, label);
  const auto [host, column] = links_->layout.find(from);
  auto work = host == links_->layout.host ? inside_->receive(tensor, column, label) : flat_->receive(tensor, from, label);
  return note(CollectiveKind::kReceive, bytes_of(tensor), std::move(work));
}

Work HierarchicalCommunicator::coalesced(const std::function<void()>& issue) { return coalesced_.run(issue, name()); }

void HierarchicalCommunicator::barrier(std::string_view label) {
  flat_->barrier(label);
  counters_.add(CollectiveKind::kBarrier, 0);
}

void HierarchicalCommunicator::give_up(std::string_view cause) {
  if (links_->all->options().check_signatures) return Communicator::give_up(cause);
  links_->disconnect(std::string(cause));
}

c10::DataPtr HierarchicalCommunicator::allocate(int64_t bytes) { return inside_->allocate(bytes); }

} // namespace tessera::internal::hierarchical
