#include <tessera/fsdp/gradients/staged_reduction.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <utility>

#include <tessera/fsdp/gradients/gradient_layout.h>
#include <tessera/fsdp/group/step_recorder.h>

namespace tessera::internal {

namespace {

/// Complex numbers as twice as many real ones: what the communicators reduce.
at::Tensor as_real(const at::Tensor& flat) { return flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat; }

/// The backward stands still for it.
void wait_for(const ParameterGroup& group, Work& reduction) {
  const ExposedTime exposed(group, &GroupReport::reduce_wait_seconds);
  reduction.wait();
}

/// The value of `parked`, for use on the current stream.
at::Tensor value_here(ParkedSum parked) {
  const auto& home = parked.home;
  if (home && *home != current_stream(home->device())) use_on_current_stream(parked.value);
  return std::move(parked.value);
}

/// What an extension has started, whose steps after a collective run where it is waited for: functions of the program.
class ExtendedWork final : public WorkState {
 public:
  ExtendedWork(ModelMutex& mutex, Work work) : mutex_(mutex), work_(std::move(work)) {}
  void wait() override {
    const ProgramCall program(mutex_, "a ReductionExtension");
    Work(work_).wait(); // a copy: others ask whether it blocks
  }
  bool is_completed() override { return work_.is_completed(); }
  bool blocks_host() const override { return work_.blocks_host(); }

 private:
  ModelMutex& mutex_;
  const Work work_;
};

} // namespace

StagedReduction::~StagedReduction() {
  try {
    wait_on_home();
  } catch (...) { // of a device that has failed
  }
}

/// On a device, before the memory of a reduction that may be in flight is freed: its home waits.
void StagedReduction::wait_on_home() {
  auto* const running = std::get_if<Running>(&state_);
  if (!running || !running->home) return;
  const c10::StreamGuard guard(*running->home);
  running->first.wait();
  running->rest_work.wait();
}

const at::Tensor* StagedReduction::parked() const {
  if (const auto* const sum = std::get_if<ParkedSum>(&state_)) return &sum->value;
  const auto* const running = std::get_if<Running>(&state_);
  return running && running->earlier ? &running->earlier->value : nullptr;
}

const std::vector<bool>* StagedReduction::used() const {
  const auto* const running = std::get_if<Running>(&state_);
  return running ? &running->call.used : nullptr;
}

std::optional<ParkedSum> StagedReduction::take_parked() {
  auto* const parked = std::get_if<ParkedSum>(&state_);
  if (!parked) return std::nullopt;
  return std::move(*parked);
}

StagedReduction::Running& StagedReduction::begin(ReductionCall call) {
  TORCH_INTERNAL_ASSERT(!is_running(), "gradients of ", group_.label(), " are still being reduced");
  auto earlier = take_parked();
  auto& running = state_.emplace<Running>();
  running.call = std::move(call);
  running.earlier = std::move(earlier);
  return running;
}

void StagedReduction::start(ReduceInput input, ReductionCall call) {
  auto& running = begin(std::move(call));
  running.input = std::move(input);
  auto& data = running.input.data;
  if (group_.streams().reduce.exists()) running.home = current_stream(data.device());
  if (const double factor = division_of(settings_, group_.stages(), running.call.dtype).early(); factor != 1) data.div_(factor);
  start_first(running);
  start_rest_in_order(running);
}

void StagedReduction::resume(ReductionCall call) {
  auto& running = begin(std::move(call));
  running.sum = value_here(*std::exchange(running.earlier, std::nullopt));
  if (group_.streams().reduce.exists()) running.home = current_stream(running.sum.device());
  start_rest_in_order(running);
}

void StagedReduction::start_first(Running& running) const {
  auto& input = running.input;
  const auto& communicator = group_.stages().reduce_scatter();
  if (!communicator) {
    running.sum = std::exchange(input.data, at::Tensor());
    if (const auto home = input.users.end(); home && home != running.home) use_on_current_stream(running.sum);
    return;
  }
  running.sum = at::empty({input.data.numel() / communicator->size()}, input.data.options());
  const auto division = division_of(settings_, group_.stages(), running.call.dtype);
  const auto& label = running.call.label;
  running.is_divided = !running.call.extension && division.adds() && !group_.stages().may_wait() && !settings_.all_reduce_hook &&
                       communicator->scales(division.dtype);
  if (!running.call.extension) note_collective(group_, CollectiveKind::kReduceScatter, input.data);
  running.first = group_.streams().reduce.run([&] {
    if (running.call.extension) return reduce_extended(running, 0, running.sum, input.data);
    const auto output = as_real(running.sum), parts = as_real(input.data);
    if (running.is_divided) return communicator->reduce_scatter_scaled(output, parts, 1 / division.late(), label);
    return communicator->reduce_scatter(output, parts, division.adds() ? ReduceOp::kSum : ReduceOp::kAvg, label);
  });
  note_work(group_, running.first);
  input.users.wait_for(running.first);
}

/// Starts the rest at once where it is in the order of a stream; elsewhere when the first stage has ended.
void StagedReduction::start_rest_in_order(Running& running) const {
  if (group_.streams().reduce.exists() && !running.first.blocks_host()) start_rest(running);
}

void StagedReduction::start_rest(Running& running) const {
  if (!group_.stages().may_wait()) return;
  const bool reduces = settings_.all_reduce();
  running.rest = reduces ? Rest::kStarted : Rest::kLeft;
  const auto& streams = group_.streams();
  if (running.earlier) running.inputs.push_back(value_here(*std::exchange(running.earlier, std::nullopt)));
  running.rest_work = (reduces ? streams.all_reduce : streams.reduce).run([&] {
    Work(running.first).wait();
    if (!running.inputs.empty()) running.sum.add_(running.inputs.front());
    return reduces ? reduce_rest(running) : Work();
  });
  if (reduces) note_work(group_, running.rest_work);
}

/// Has the extension start stage `number`.
Work StagedReduction::reduce_extended(Running& running, size_t number, const at::Tensor& output, const at::Tensor& input) const {
  const auto stage = reduction_stages_of(group_.roles(), group_.stages())[number];
  const bool adds = division_of(settings_, group_.stages(), running.call.dtype).adds();
  const auto& extension = running.call.extension;
  const ProgramCall program(group_.mutex(), "a ReductionExtension");
  const bool scatters = stage.kind == ReductionStage::Kind::kReduceScatter;
  note_collective(group_, scatters ? CollectiveKind::kReduceScatter : CollectiveKind::kAllReduce, extension->payload(stage));
  auto work = extension->reduce({.stage = stage,
                                 .op = adds ? ReduceOp::kSum : ReduceOp::kAvg,
                                 .input = input,
                                 .output = output,
                                 .label = running.call.label});
  return Work(std::make_shared<ExtendedWork>(group_.mutex(), std::move(work)));
}

/// Starts the last stage.
Work StagedReduction::reduce_rest(Running& running) const {
  const auto& stage = group_.stages().reductions.back();
  const size_t last = group_.stages().reductions.size() - 1;
  const auto op = division_of(settings_, group_.stages(), running.call.dtype).adds() ? ReduceOp::kSum : ReduceOp::kAvg;
  auto& sum = running.sum;
  if (stage.kind == Stage::Kind::kAllReduce) {
    if (running.call.extension) return reduce_extended(running, last, sum, sum);
    note_collective(group_, CollectiveKind::kAllReduce, sum);
    return stage.communicator->all_reduce(as_real(sum), op, running.call.label);
  }
  running.inputs.push_back(std::exchange(sum, at::empty({sum.numel() / stage.ranks()}, sum.options())));
  if (running.call.extension) return reduce_extended(running, last, sum, running.inputs.back());
  note_collective(group_, CollectiveKind::kReduceScatter, running.inputs.back());
  return stage.communicator->reduce_scatter(as_real(sum), as_real(running.inputs.back()), op, running.call.label);
}

void StagedReduction::finish_on(const c10::Stream& stream, const std::function<void(const at::Tensor&, bool)>& function) {
  auto* const running = std::get_if<Running>(&state_);
  if (!running || !running->home || running->first.blocks_host() || running->rest_work.blocks_host()) return;
  if (group_.stages().may_wait() && running->rest != Rest::kStarted) return;
  const c10::StreamGuard guard(stream);
  mark(*running->home).wait(); // what `resume` starts from is there
  Work(running->first).wait();
  Work(running->rest_work).wait();
  try {
    function(running->sum, running->is_divided);
  } catch (...) { // what it has started uses memory that is freed when the backward ends
    running->rest_work = mark(stream);
    throw;
  }
  running->rest_work = mark(stream);
  running->is_finished = true;
}

/// The current stream may be another one than the memory's home. Then the home gets the memory back no earlier than the current
/// stream has done with it.
void StagedReduction::wait_for_rest(Running& running) const {
  wait_for(group_, running.rest_work);
  const auto& home = running.home;
  if (!home || *home == current_stream(home->device())) return;
  use_on_current_stream(running.sum);
  for (const auto& tensor : running.inputs) use_on_current_stream(tensor);
}

void StagedReduction::advance() {
  auto* const running = std::get_if<Running>(&state_);
  if (!running) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  wait_for(group_, running->first);
  running->input.release();
  if (running->rest == Rest::kToStart) start_rest(*running);
  if (running->rest != Rest::kLeft) return;
  wait_for_rest(*running);
  ParkedSum parked{.value = std::move(running->sum), .home = running->home};
  state_ = std::move(parked);
}

std::optional<ReducedSum> StagedReduction::finish() {
  advance();
  auto* const running = std::get_if<Running>(&state_);
  if (!running) return std::nullopt;
  wait_for_rest(*running);
  ReducedSum reduced{.value = std::move(running->sum),
                     .used = std::move(running->call.used),
                     .is_divided = running->is_divided,
                     .is_finished = running->is_finished};
  state_ = Idle();
  return reduced;
}

Work StagedReduction::discard() {
  try {
    wait_on_home();
  } catch (...) { // of a broken communicator: what is returned throws it again, when all is forgotten
  }
  Work left;
  if (auto* const running = std::get_if<Running>(&state_)) {
    running->input.release();
    left = running->rest_work.is_completed() ? running->first : running->rest_work;
  }
  state_ = Idle();
  return left;
}

} // namespace tessera::internal
