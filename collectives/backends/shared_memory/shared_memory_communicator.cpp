#include <tessera/collectives/backends/shared_memory/shared_memory_communicator.h>

#include <tessera/base/stream_copy.h>
#include <tessera/collectives/calls/checks.h>

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

/// What each rank sends to each, in one piece after another.
void split(const CollectiveCall& call, Motion& motion) {
  const auto width = static_cast<int64_t>(call.input.element_size());
  const auto cut = [width](const at::Tensor& tensor, const std::vector<int64_t>& splits, Parts& parts) {
    auto* data = part_of(tensor).data;
    for (const auto split : splits) {
      parts.push_back({data, split * width});
      data += split * width;
    }
  };
  motion.varies = true;
  cut(call.input, call.splits.input, motion.send);
  cut(call.output, call.splits.output, motion.receive);
}

} // namespace

SharedMemoryCommunicator::SharedMemoryCommunicator(std::string name, RankList ranks, int rank, std::shared_ptr<Engine> engine,
                                                   std::shared_ptr<Arena> arena)
    : CheckedCommunicator(std::move(name), std::move(ranks), rank, at::kCPU),
      engine_(std::move(engine)),
      arena_(std::move(arena)) {}

SharedMemoryCommunicator::~SharedMemoryCommunicator() { engine_->close(); }

bool SharedMemoryCommunicator::is_shared(const at::Tensor& tensor) const { return arena_ && arena_->find(tensor.data_ptr()); }

Work SharedMemoryCommunicator::start(CollectiveCall&& call) {
  Engine::LaneKey lane;
  if (call.kind == CollectiveKind::kSend) lane = {rank(), call.peer};
  if (call.kind == CollectiveKind::kReceive) lane = {call.peer, rank()};
  Request request{.kind = call.kind,
                  .label = std::string(call.label),
                  .signature = call.signature(),
                  .motion = motion_of(call),
                  .tensors = {std::move(call.input), std::move(call.output)}};
  if (request.motion.varies) request.counts = call.splits.byte_counts(request.tensors[0].element_size());
  return Work(std::make_shared<OperationWork>(engine_, engine_->start(lane, std::move(request))));
}

Motion SharedMemoryCommunicator::motion_of(const CollectiveCall& call) const {
  Motion motion;
  if (call.kind == CollectiveKind::kBarrier) return motion;
  motion.kind = Motion::Kind::kCopies;
  motion.input = part_of(call.input.defined() ? call.input : call.output);
  motion.largest_input = motion.input.count;
  motion.dtype = call.full().scalar_type();
  motion.op = call.op;
  switch (call.kind) {
    case CollectiveKind::kAllGather: gather(call, motion); break;
    case CollectiveKind::kReduceScatter:
      motion.kind = Motion::Kind::kReduceScatter;
      motion.output = part_of(call.output);
      break;
    case CollectiveKind::kAllReduce:
      motion.kind = Motion::Kind::kAllReduce;
      motion.output = motion.input;
      break;
    case CollectiveKind::kAllToAll: split(call, motion); break;
    case CollectiveKind::kBroadcast:
      motion.receive.resize(size());
      if (rank() != call.peer) motion.receive[call.peer] = std::exchange(motion.input, {});
      break;
    case CollectiveKind::kSend: motion.receive.resize(2); break;
    case CollectiveKind::kReceive: motion.receive = {std::exchange(motion.input, {}), {}}; break;
    case CollectiveKind::kBarrier: break;
  }
  if (arena_) motion.location = arena_->find(motion.input.data).value_or(kNowhere);
  return motion;
}

void SharedMemoryCommunicator::gather(const CollectiveCall& call, Motion& motion) const {
  const auto whole = part_of(call.output), own = motion.input;
  for (int from = 0; from < size(); ++from) motion.receive.push_back({whole.data + from * own.count, own.count});
  if (!is_shared(call.output) || is_shared(call.input)) return;
  motion.input = motion.receive[rank()]; // where this rank's copy is due anyway, the others read it
  copy(motion.input.data, own.data, own.count, writes_of(whole.count));
}

c10::DataPtr SharedMemoryCommunicator::allocate(int64_t bytes) {
  auto memory = arena_ && bytes >= 0 ? arena_->allocate(bytes) : c10::DataPtr();
  return memory ? std::move(memory) : Communicator::allocate(bytes);
}

} // namespace tessera::internal::shared_memory
