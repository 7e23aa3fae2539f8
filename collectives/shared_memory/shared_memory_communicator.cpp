#include <tessera/collectives/shared_memory/shared_memory_communicator.h>

#include <tessera/collectives/checks.h>
#include <tessera/collectives/stream_copy.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace tessera::internal::shared_memory {

namespace {

/// The user's handle of a call. One that is dropped before `wait` is completed in the background.
class OperationWork final : public WorkState {
 public:
  OperationWork(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> operation)
      : engine_(std::move(engine)), operation_(std::move(operation)) {}
  ~OperationWork() override {
    if (engine_->is_forked_copy())
      leave_to_parent(std::move(operation_)); // which is the one to complete it
    else if (!operation_->is_done())
      engine_->complete_in_background(*operation_);
  }
  OperationWork(const OperationWork&) = delete;
  OperationWork& operator=(const OperationWork&) = delete;

  void wait() override {
    engine_->check_not_forked("a collective that was started before a fork");
    engine_->wait(*operation_);
  }
  bool is_completed() override { return engine_->is_completed(*operation_); }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Operation> operation_;
};

Part part_of(const at::Tensor& tensor) { return {static_cast<char*>(tensor.data_ptr()), static_cast<int64_t>(tensor.nbytes())}; }

Request make_request(CollectiveKind kind, std::string_view label, const at::Tensor& input, const at::Tensor& output,
                     Motion::Kind motion, ReduceOp op = ReduceOp::kSum, int root = -1) {
  const auto& larger = output.nbytes() > input.nbytes() ? output : input;
  Request request;
  request.kind = kind;
  request.label = label;
  request.signature = make_signature(kind, label, input.scalar_type(), static_cast<int64_t>(larger.nbytes()), op, root);
  request.motion.kind = motion;
  request.motion.input = part_of(input);
  request.motion.largest_input = request.motion.input.count;
  request.motion.dtype = input.scalar_type();
  request.motion.op = op;
  request.tensors = {input, output};
  return request;
}

} // namespace

SharedMemoryCommunicator::SharedMemoryCommunicator(std::string name, RankList ranks, int rank, std::shared_ptr<Engine> engine,
                                                   std::shared_ptr<Arena> arena)
    : Communicator(std::move(name), std::move(ranks), rank, at::kCPU), engine_(std::move(engine)), arena_(std::move(arena)) {}

SharedMemoryCommunicator::~SharedMemoryCommunicator() { engine_->close(); }

bool SharedMemoryCommunicator::is_shared(const at::Tensor& tensor) const { return arena_ && arena_->find(tensor.data_ptr()); }

Work SharedMemoryCommunicator::run(Request request, int64_t bytes, Engine::LaneKey lane) {
  const auto kind = request.kind;
  if (arena_) request.motion.location = arena_->find(request.motion.input.data).value_or(kNowhere);
  Work work(std::make_shared<OperationWork>(engine_, engine_->start(lane, std::move(request))));
  counters_.add(kind, bytes);
  return coalesced_.note(std::move(work));
}

Work SharedMemoryCommunicator::all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) {
  check_all_gather(*this, output, input, label);
  auto request = make_request(CollectiveKind::kAllGather, label, input, output, Motion::Kind::kCopies);
  const auto [data, count] = part_of(input);
  for (int from = 0; from < size(); ++from) request.motion.receive.push_back({part_of(output).data + from * count, count});
  if (is_shared(output) && !is_shared(input)) { // where this rank's copy is due anyway, the others read it
    request.motion.input = request.motion.receive[rank()];
    copy(request.motion.input.data, data, count, writes_of(static_cast<int64_t>(output.nbytes())));
  }
  return run(std::move(request), static_cast<int64_t>(output.nbytes()));
}

Work SharedMemoryCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                              std::string_view label) {
  check_reduce_scatter(*this, output, input, op, label);
  auto request = make_request(CollectiveKind::kReduceScatter, label, input, output, Motion::Kind::kReduceScatter, op);
  request.motion.output = part_of(output);
  return run(std::move(request), static_cast<int64_t>(input.nbytes()));
}

Work SharedMemoryCommunicator::all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) {
  check_all_reduce(*this, tensor, op, label);
  auto request = make_request(CollectiveKind::kAllReduce, label, tensor, tensor, Motion::Kind::kAllReduce, op);
  request.motion.output = part_of(tensor);
  return run(std::move(request), static_cast<int64_t>(tensor.nbytes()));
}

Work SharedMemoryCommunicator::all_to_all(const at::Tensor& output, const at::Tensor& input,
                                          const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
                                          std::string_view label) {
  const auto splits = check_all_to_all(*this, output, input, output_splits, input_splits, label);
  const auto width = static_cast<int64_t>(input.element_size());
  auto request = make_request(CollectiveKind::kAllToAll, label, input, output, Motion::Kind::kCopies);
  request.counts = splits.byte_counts(width);
  auto& motion = request.motion;
  motion.varies = true;
  auto *sent = part_of(input).data, *received = part_of(output).data;
  for (int rank = 0; rank < size(); ++rank) {
    motion.send.push_back({sent, splits.input[rank] * width});
    motion.receive.push_back({received, splits.output[rank] * width});
    sent += motion.send.back().count;
    received += motion.receive.back().count;
  }
  return run(std::move(request), static_cast<int64_t>(std::max(output.nbytes(), input.nbytes())));
}

Work SharedMemoryCommunicator::broadcast(const at::Tensor& tensor, int root, std::string_view label) {
  check_broadcast(*this, tensor, root, label);
  auto request = make_request(CollectiveKind::kBroadcast, label, tensor, tensor, Motion::Kind::kCopies, ReduceOp::kSum, root);
  auto& motion = request.motion;
  motion.receive.resize(size());
  if (rank() != root) motion.receive[root] = std::exchange(motion.input, {});
  return run(std::move(request), static_cast<int64_t>(tensor.nbytes()));
}

Work SharedMemoryCommunicator::send(const at::Tensor& tensor, int to, std::string_view label) {
  check_send(*this, tensor, to, label);
  auto request = make_request(CollectiveKind::kSend, label, tensor, tensor, Motion::Kind::kCopies);
  request.motion.receive.resize(2);
  return run(std::move(request), static_cast<int64_t>(tensor.nbytes()), {rank(), to});
}

Work SharedMemoryCommunicator::receive(const at::Tensor& tensor, int from, std::string_view label) {
  check_receive(*this, tensor, from, label);
  auto request = make_request(CollectiveKind::kReceive, label, tensor, tensor, Motion::Kind::kCopies);
  request.motion.receive = {std::exchange(request.motion.input, {}), {}};
  return run(std::move(request), static_cast<int64_t>(tensor.nbytes()), {from, rank()});
}

Work SharedMemoryCommunicator::coalesced(const std::function<void()>& issue) { return coalesced_.run(issue, name()); }

c10::DataPtr SharedMemoryCommunicator::allocate(int64_t bytes) {
  auto memory = arena_ && bytes >= 0 ? arena_->allocate(bytes) : c10::DataPtr();
  return memory ? std::move(memory) : Communicator::allocate(bytes);
}

void SharedMemoryCommunicator::barrier(std::string_view label) {
  Request request;
  request.kind = CollectiveKind::kBarrier;
  request.label = label;
  request.signature = make_signature(CollectiveKind::kBarrier, label, at::kByte, 0);
  run(std::move(request), 0).wait();
}

} // namespace tessera::internal::shared_memory
