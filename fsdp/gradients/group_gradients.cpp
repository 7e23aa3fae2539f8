#include <tessera/fsdp/gradients/group_gradients.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/real.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/variable.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/error_text.h>
#include <tessera/base/tensor_over.h>
#include <tessera/fsdp/gradients/unreduced_gradient.h>
#include <tessera/fsdp/group/profiler_range.h>
#include <tessera/fsdp/group/step_recorder.h>

namespace tessera::internal {

namespace {

at::Tensor make_gradient(at::Tensor local, const ShardedParameter& parameter) {
  auto meta = c10::make_intrusive<DTensorMeta>(std::move(local), parameter.spec);
  meta->provenance.name = parameter.gradient_name;
  return make_dtensor(std::move(meta));
}

/// `gradient` after the hooks that the user registered on `parameter`. One more is the group's own (parameter_group.cpp), which
/// returns a DTensor as it is: where no other is registered, none is called.
at::Tensor call_hooks(const at::Tensor& parameter, at::Tensor gradient) {
  const auto& hooks = torch::autograd::impl::hooks(parameter);
  const auto& functions = torch::autograd::impl::get_autograd_meta(parameter)->cpp_hooks_list_;
  if (hooks.size() == 1 && functions && functions->size() == 1) return gradient;
  torch::autograd::variable_list hooked;
  hooked.push_back(std::move(gradient));
  for (const auto& hook : hooks) hooked = (*hook)(hooked);
  return std::move(hooked[0]);
}

/// Complex numbers as twice as many real ones: what the communicators reduce.
at::Tensor as_real(const at::Tensor& flat) { return flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat; }

/// The backward stands still for it.
void wait_for(const ParameterGroup& group, Work& reduction) {
  const ExposedTime exposed(group, &GroupReport::reduce_wait_seconds);
  reduction.wait();
}

/// The `numel` reduced elements from `offset` on that are this rank's part of a parameter: of its shape where that costs nothing.
at::Tensor part_of(const at::Tensor& reduced, const ShardedParameter& parameter, int64_t offset, int64_t numel) {
  const auto dtype = reduced.scalar_type();
  if (dtype != parameter.spec->dtype() || !reduced.is_contiguous()) return reduced.narrow(0, offset, numel);
  const auto bytes = (reduced.storage_offset() + offset) * static_cast<int64_t>(reduced.element_size());
  return tensor_over(reduced.storage(), bytes, parameter.spec->local_sizes(), dtype, {}, parameter.shard_strides());
}

/// Whether `gradient` has this rank's part of the parameter. Its strides may be others, where the program has made it.
bool is_sharded_as(const ShardedParameter& parameter, const DTensorMeta* gradient) {
  if (!gradient || gradient->spec == parameter.spec) return gradient != nullptr;
  const Spec &spec = *gradient->spec, &own = *parameter.spec;
  return spec.mesh() == own.mesh() && spec.placements() == own.placements() && spec.sizes() == own.sizes() &&
         spec.dtype() == own.dtype();
}

} // namespace

void add(ReadyGradient& sum, const ReadyGradient& part) {
  const auto &local = dtensor_meta(sum.value)->local, &other = dtensor_meta(part.value)->local;
  sum.value = make_gradient(local + other.to(local.options()), sum.group->parameters()[sum.index]);
}

void deliver(ReadyGradient ready) {
  const auto& parameter = ready.group->parameters()[ready.index];
  const at::Tensor tensor(parameter.tensor.lock());
  if (!tensor.defined()) return;
  const bool is_trained = tensor.requires_grad(); // one frozen since its backward still gets what is on its way
  auto added = call_hooks(tensor, std::move(ready.value));
  if (is_trained && !tensor.requires_grad()) return; // a hook froze it
  const auto* meta = dtensor_meta(added);
  TORCH_CHECK(is_sharded_as(parameter, meta), "a hook on the sharded parameter ", ready.group->full_name(ready.index),
              " returned a gradient that is not sharded as the parameter is");
  auto& sum = reduced_gradient(tensor);
  if (sum.defined()) {
    auto* sum_meta = dtensor_meta(sum);
    TORCH_CHECK(is_sharded_as(parameter, sum_meta), "the gradient of ", ready.group->full_name(ready.index),
                " was replaced by a tensor that is not sharded as the parameter is");
    sum_meta->local.add_(meta->local.to(sum_meta->local.device())); // a program's may be on the device
  } else {
    const bool is_kept = added.use_count() > 1; // by a hook, whose tensor the next backward must not change
    sum = is_kept ? make_gradient(meta->local.clone(), parameter) : std::move(added);
  }
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensor)) (*hook)(tensor);
}

std::vector<bool> trained_of(const ParameterGroup& group) {
  std::vector<bool> trained;
  trained.reserve(group.parameters().size());
  for (const auto& parameter : group.parameters()) trained.push_back(is_trained(parameter));
  return trained;
}

bool trains_any(const ParameterGroup& group) {
  return std::any_of(group.parameters().begin(), group.parameters().end(), is_trained);
}

GroupGradients::~GroupGradients() {
  try {
    wait_on_home();
  } catch (...) { // of a device that has failed
  }
}

void GroupGradients::wait_on_home() {
  if (!reduction_.home) return;
  const c10::StreamGuard guard(*reduction_.home);
  reduction_.first.wait();
  reduction_.second.wait();
}

std::string GroupGradients::label() const {
  return group_.label() + label_ + (settings.divide_factor ? fmt::format(" divided by {}", *settings.divide_factor) : "");
}

void GroupGradients::set_divide_factor(double factor) {
  // What waits for its all-reduce is a sum or a mean along the shard axis, and is divided at the end, in fp16 partly before.
  const auto now = divisor();
  const bool fits = now && early_factor(now) == early_factor(factor);
  const bool differs = is_reducing() ? settings.divide_factor != factor : partial_.defined() && !fits;
  TORCH_CHECK(!differs, "set_gradient_divide_factor: gradients of ", group_.label(),
              " are still being reduced, with another factor: set it before the first backward of a gradient accumulation");
  settings.divide_factor = factor;
}

bool GroupGradients::reduces_alone() const { return group_.stages().reductions.empty() && !settings.all_reduce_hook; }

/// What the sum over the ranks is divided by where the collectives do not average: the program's factor, or the number of ranks.
std::optional<double> GroupGradients::divisor() const {
  if (settings.divide_factor || group_.stages().averages(dtype_)) return settings.divide_factor;
  return group_.stages().reducing_ranks();
}

/// What the gradients are divided by before they are added: a sum of fp16 numbers may be too large for it. A power of two, so
/// that it rounds nothing, near the root of the factor, so that neither end loses range (FSDP2).
double GroupGradients::early_factor(const std::optional<double>& factor) const {
  if (!factor || dtype_ != at::kHalf || *factor <= 1) return 1;
  return std::exp2(std::ceil(std::log2(*factor) / 2));
}

double GroupGradients::late_factor() const { return *divisor() / early_factor(divisor()); }

at::ScalarType reduce_dtype_of(const ParameterGroup& group, const std::vector<bool>& takes_part) {
  const auto& policy = group.options().mixed_precision;
  std::optional<at::ScalarType> dtype = policy.reduce_dtype;
  for (size_t i = 0; i < takes_part.size(); ++i) {
    if (!takes_part[i]) continue;
    const auto own = group.parameters()[i].unsharded_dtype;
    if (policy.reduce_dtype && !at::isComplexType(own)) continue;
    dtype = dtype ? c10::promoteTypes(*dtype, own) : own;
  }
  return dtype.value_or(at::kFloat);
}

std::optional<at::ScalarType> GroupGradients::common_dtype() const {
  std::optional<at::ScalarType> dtype;
  for (size_t i = 0; i < takes_part_.size(); ++i) {
    if (!takes_part_[i]) continue;
    const auto own = group_.parameters()[i].spec->dtype();
    if (dtype && *dtype != own) return std::nullopt;
    dtype = own;
  }
  return dtype;
}

void GroupGradients::prepare_layout() {
  group_.prefetch_parameters();
  const auto& parameters = group_.parameters();
  auto takes_part = trained_of(group_);
  if (takes_part == takes_part_) return;
  takes_part_ = std::move(takes_part);
  leaves_out_any_ = std::find(takes_part_.begin(), takes_part_.end(), false) != takes_part_.end();
  label_.clear();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (takes_part_[i] || !parameters[i].accumulator) continue;
    label_ += (label_.empty() ? " without " : ", ") + group_.full_name(i);
  }
  layout_ = plan_reduce(group_.layout(), takes_part_);
  dtype_ = reduce_dtype_of(group_, takes_part_);
  pending_.resize(parameters.size());
  blank_.resize(parameters.size());
}

void GroupGradients::prepare_buffer() {
  // What is on its way, or waits for an all-reduce, lies as the layout says.
  if (pending_count_ == 0 && !landed_.has_any() && !is_reducing() && !partial_.defined()) prepare_layout();
  if (!reduces_alone()) buffer_.allocate(layout_, dtype_);
}

void GroupGradients::land(size_t index, const at::Tensor& gradient, double weight) {
  if (!gradient.defined() || !is_trained(group_.parameters()[index])) return; // frozen since its forward
  prepare_buffer();
  TORCH_CHECK_NOT_IMPLEMENTED(!gradient.is_sparse(), "the parameter ", group_.full_name(index),
                              " has a sparse gradient, which fully_shard cannot reduce; build its embedding with sparse(false)");
  TORCH_CHECK(
      takes_part_[index], "the parameter ", group_.full_name(index),
      " began to require a gradient while gradients of its group were being accumulated or reduced; run a synchronized backward "
      "first");
  const bool is_blank = weight == 0, alone = reduces_alone();
  at::Tensor product;
  // In the dtype of the reduction, where that holds more: the weight may be large.
  if (weight != 1 && !is_blank) product = gradient.to(c10::promoteTypes(gradient.scalar_type(), dtype_)) * weight;
  const auto& weighted = product.defined() ? product : gradient;
  if (alone) {
    if (!is_blank) add_whole(index, weighted);
  } else {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (is_blank) {
      buffer_.add_nothing(index);
    } else {
      buffer_.add(index, weighted);
    }
  }
  blank_[index] = is_blank && (blank_[index] || !pending_[index]);
  if (!pending_[index]) ++pending_count_;
  pending_[index] = true;
  landed_.land(index);
}

void GroupGradients::join_reduction() { joins_ = joins_ || trains_any(group_); }

void GroupGradients::keep_unreduced() {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  buffer_.flush();
  landed_.forget();
  joins_ = false;
}

void GroupGradients::enter(State next) {
  const bool legal = next == State::kIdle ? is_reducing() : static_cast<int>(next) == static_cast<int>(state_) + 1;
  TORCH_INTERNAL_ASSERT(legal, "gradients of ", group_.label(), ": from state ", static_cast<int>(state_), " to ",
                        static_cast<int>(next));
  state_ = next;
}

void GroupGradients::start_reduce(ReadyGradients& ready) {
  TORCH_INTERNAL_ASSERT(has_pending());
  const ProfilerRange range("reduce_scatter", group_);
  const bool joins = std::exchange(joins_, false);
  if (pending_count_ == 0 && (!joins || partial_.defined())) return take_up_partial();
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (pending_count_ == 0) prepare_buffer();
  landed_.forget();
  pending_count_ = 0;
  auto used = std::exchange(pending_, std::vector<bool>(pending_.size()));
  for (size_t i = 0; i < used.size(); ++i) used[i] = used[i] && !blank_[i];
  std::fill(blank_.begin(), blank_.end(), false);
  if (reduces_alone()) return finish_alone(ready);
  reduction_.input = buffer_.take(takes_part_, used);
  reduction_.used = std::move(used);
  if (group_.streams().reduce.exists()) reduction_.home = current_stream(reduction_.input.data.device());
  if (const double factor = early_factor(divisor()); factor != 1) reduction_.input.data.div_(factor);
  start_first();
  enter(State::kFirst);
  if (group_.streams().reduce.exists() && !reduction_.first.blocks_host()) start_second();
}

void GroupGradients::start_first() {
  auto& input = reduction_.input;
  const auto& communicator = group_.stages().reduce_scatter();
  if (!communicator) {
    reduction_.output = std::exchange(input.data, at::Tensor());
    if (const auto home = input.users.end(); home && home != reduction_.home) use_on_current_stream(reduction_.output);
    return;
  }
  reduction_.output = at::empty({input.data.numel() / communicator->size()}, input.data.options());
  const bool adds = divisor().has_value();
  reduction_.is_divided = adds && !group_.stages().may_wait() && !settings.all_reduce_hook && communicator->scales(dtype_);
  note_collective(group_, CollectiveKind::kReduceScatter, input.data);
  reduction_.first = group_.streams().reduce.run([&] {
    const auto output = as_real(reduction_.output), parts = as_real(input.data);
    if (reduction_.is_divided) return communicator->reduce_scatter_scaled(output, parts, 1 / late_factor(), label());
    return communicator->reduce_scatter(output, parts, adds ? ReduceOp::kSum : ReduceOp::kAvg, label());
  });
  note_work(group_, reduction_.first);
  input.users.wait_for(reduction_.first);
}

at::Tensor GroupGradients::take_partial() {
  const auto home = std::exchange(partial_home_, std::nullopt);
  if (home && *home != current_stream(home->device())) use_on_current_stream(partial_);
  return std::exchange(partial_, at::Tensor());
}

void GroupGradients::take_up_partial() {
  landed_.forget();
  reduction_.used.assign(group_.parameters().size(), false); // in this backward; the flags know of those before
  reduction_.output = take_partial();
  if (group_.streams().reduce.exists()) reduction_.home = current_stream(reduction_.output.device());
  enter(State::kFirst);
  if (group_.streams().reduce.exists() && !reduction_.first.blocks_host()) start_second();
}

/// What follows the first collective: at once where it is in the order of a stream, and otherwise when the first has ended.
void GroupGradients::start_second() {
  if (!group_.stages().may_wait()) return;
  reduction_.has_second = true;
  const auto& streams = group_.streams();
  reduction_.partial = take_partial();
  reduction_.second = (settings.all_reduce() ? streams.all_reduce : streams.reduce).run([&] {
    Work(reduction_.first).wait();
    if (reduction_.partial.defined()) reduction_.output.add_(reduction_.partial);
    return settings.all_reduce() ? reduce_replicas() : Work();
  });
  reduction_.is_partial = !settings.all_reduce();
  if (!reduction_.is_partial) note_work(group_, reduction_.second);
}

Work GroupGradients::reduce_replicas() {
  const auto op = divisor() ? ReduceOp::kSum : ReduceOp::kAvg;
  const auto& last = group_.stages().reductions.back();
  if (last.kind == Stage::Kind::kAllReduce) {
    note_collective(group_, CollectiveKind::kAllReduce, reduction_.output);
    return last.communicator->all_reduce(as_real(reduction_.output), op, label());
  }
  reduction_.outer_input = std::exchange(reduction_.output, at::empty({layout_.chunk_numel}, reduction_.output.options()));
  note_collective(group_, CollectiveKind::kReduceScatter, reduction_.outer_input);
  return last.communicator->reduce_scatter(as_real(reduction_.output), as_real(reduction_.outer_input), op, label());
}

void GroupGradients::wait_for_second() {
  wait_for(group_, reduction_.second);
  const auto& home = reduction_.home;
  if (!home || *home == current_stream(home->device())) return;
  for (const auto* tensor : {&reduction_.output, &reduction_.partial, &reduction_.outer_input}) use_on_current_stream(*tensor);
}

void GroupGradients::advance_reduce() {
  if (state_ != State::kFirst) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  wait_for(group_, reduction_.first);
  reduction_.input.release();
  if (!group_.stages().may_wait()) return;
  if (!reduction_.has_second) start_second();
  enter(State::kSecond);
  if (!reduction_.is_partial) return;
  wait_for_second();
  partial_home_ = reduction_.home;
  partial_ = std::exchange(reduction_, Reduction()).output;
  enter(State::kIdle);
}

void GroupGradients::finish_reduce(ReadyGradients& ready) {
  if (!is_reducing()) return;
  const ProfilerRange range("reduce_wait", group_);
  advance_reduce();
  if (!is_reducing()) return;
  enter(State::kIdle);
  const at::NoGradGuard no_grad;
  wait_for_second();
  auto done = std::exchange(reduction_, Reduction());
  finish_sum(done.output, done.is_divided);
  const auto rank = static_cast<size_t>(group_.roles().shard_rank());
  const auto& parameters = group_.parameters();
  const auto gradients = common_dtype() ? done.output.to(*common_dtype()) : done.output;
  const size_t first = ready.size();
  ready.reserve(ready.size() + parameters.size());
  const auto used = used_anywhere(done.output, done.used);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!takes_part_[i]) continue;
    release_gradient(parameters[i]);
    if (!used[i]) continue; // its gradient stays as it is
    const int64_t numel = group_.layout().parameters[i].pieces[rank].numel;
    ready.push_back(make_ready(i, part_of(gradients, parameters[i], layout_.offsets[i][rank], numel)));
  }
  offload(ready, first);
}

void GroupGradients::finish_sum(const at::Tensor& reduced, bool is_divided) const {
  const bool divides = divisor() && !is_divided;
  if (!divides && !settings.all_reduce_hook) return;
  const auto gradients = reduced.narrow(0, 0, layout_.used_offset);
  if (divides && !settings.divide_factor)
    gradients.div_(late_factor()); // a hook sees the mean, however the collectives have come to it
  if (settings.all_reduce_hook) {
    zero_gaps(reduced);
    settings.all_reduce_hook(gradients);
  }
  if (divides && settings.divide_factor) gradients.div_(late_factor());
}

/// Nothing has written what lies between the pieces, and a hook may sum all up.
void GroupGradients::zero_gaps(const at::Tensor& reduced) const {
  const auto rank = static_cast<size_t>(group_.roles().shard_rank());
  CopyList list;
  int64_t end = 0;
  const auto zero_to = [&](int64_t begin) {
    if (begin > end) list.zero(reduced.narrow(0, end, begin - end));
  };
  for (size_t i = 0; i < takes_part_.size(); ++i) {
    if (!takes_part_[i]) continue;
    const int64_t offset = layout_.offsets[i][rank];
    zero_to(offset);
    end = offset + group_.layout().parameters[i].pieces[rank].numel;
  }
  zero_to(layout_.used_offset);
  list.run();
}

/// The parameters that this rank used, and those that another one did: the reduced flags say so. They are only read where it
/// matters, because on a device that waits for the reduction.
std::vector<bool> GroupGradients::used_anywhere(const at::Tensor& reduced, std::vector<bool> used) const {
  bool asks = false;
  for (size_t i = 0; i < used.size(); ++i) asks = asks || (takes_part_[i] && !used[i]);
  if (!asks || reduced.is_meta()) return used;
  const auto flags = reduced.narrow(0, layout_.used_offset, static_cast<int64_t>(used.size())).to(at::kCPU, at::kDouble);
  for (size_t i = 0; i < used.size(); ++i) used[i] = used[i] || flags.const_data_ptr<double>()[i] != 0;
  return used;
}

void GroupGradients::offload(ReadyGradients& ready, size_t first) const {
  if (!group_.memory() || first == ready.size()) return;
  std::vector<at::Tensor> locals;
  for (size_t i = first; i < ready.size(); ++i) locals.push_back(dtensor_meta(ready[i].value)->local);
  MovedTensors moved;
  try {
    moved = start_move(*group_.memory(), locals);
  } catch (const std::exception& error) { // the other ranks go on with the backward: the gradients are in the host's memory
    group_.memory()->delayed_failure().note(error_text(error));
    for (size_t i = first; i < ready.size(); ++i)
      ready[i].value = make_gradient(locals[i - first].to(at::kCPU), group_.parameters()[ready[i].index]);
    return;
  }
  const std::shared_ptr<PendingCopy> copy = std::move(moved.copy);
  for (size_t i = first; i < ready.size(); ++i) {
    ready[i].value = make_gradient(std::move(moved.tensors[i - first]), group_.parameters()[ready[i].index]);
    ready[i].copy = copy;
  }
  const bool frees_host_memory = locals[0].is_cpu();
  locals.clear();
  if (frees_host_memory) release_freed_memory();
}

void GroupGradients::withhold_unreduced() const {
  const at::NoGradGuard no_grad;
  auto unreduced = pending_;
  for (size_t i = 0; is_reducing() && i < unreduced.size(); ++i) unreduced[i] = unreduced[i] || reduction_.used[i];
  if (partial_.defined()) unreduced = used_anywhere(partial_, std::move(unreduced));
  for (size_t i = 0; i < unreduced.size(); ++i) {
    if (unreduced[i]) withhold_gradient(group_.parameters()[i]);
  }
}

void GroupGradients::add_whole(size_t index, const at::Tensor& gradient) {
  whole_.resize(group_.parameters().size());
  auto& sum = whole_[index];
  if (!sum.defined()) return void(sum = gradient);
  const auto dtype = c10::promoteTypes(sum.scalar_type(), dtype_); // as in a reduce buffer, and never less than it has
  sum = (sum.scalar_type() == dtype ? sum : sum.to(dtype)).add_(gradient);
}

void GroupGradients::finish_alone(ReadyGradients& ready) {
  const size_t first = ready.size();
  ready.reserve(ready.size() + whole_.size());
  whole_.resize(takes_part_.size());
  for (size_t i = 0; i < whole_.size(); ++i) {
    if (!takes_part_[i]) continue;
    release_gradient(group_.parameters()[i]);
    if (!whole_[i].defined()) continue; // not used, or by a stand-in alone
    auto gradient = std::exchange(whole_[i], at::Tensor());
    if (settings.divide_factor)
      gradient = gradient.to(c10::promoteTypes(gradient.scalar_type(), dtype_)).div(*settings.divide_factor);
    ready.push_back(make_ready(i, gradient));
  }
  offload(ready, first);
}

ReadyGradient GroupGradients::make_ready(size_t index, const at::Tensor& reduced) const {
  const auto& parameter = group_.parameters()[index];
  const auto& spec = parameter.spec;
  const auto& sizes = spec->local_sizes();
  const auto strides = parameter.shard_strides();
  at::Tensor local = reduced;
  if (reduced.sizes() != c10::IntArrayRef(sizes))
    local = strides.empty() ? reduced.reshape(sizes) : reduced.as_strided(sizes, strides);
  if (local.is_complex() && !at::isComplexType(spec->dtype())) local = at::real(local);
  if (local.scalar_type() != spec->dtype()) local = local.to(spec->dtype());
  return {group_.shared_from_this(), index, make_gradient(std::move(local), parameter)};
}

Work GroupGradients::discard() {
  state_ = State::kIdle;
  try {
    wait_on_home();
  } catch (...) { // of a broken communicator: what is returned throws it again, when all is forgotten
  }
  reduction_.input.release();
  const auto dropped = std::exchange(reduction_, Reduction());
  partial_ = at::Tensor();
  buffer_.drop();
  whole_.clear();
  std::fill(pending_.begin(), pending_.end(), false);
  std::fill(blank_.begin(), blank_.end(), false);
  pending_count_ = 0;
  joins_ = false;
  landed_.forget();
  for (auto& parameter : group_.parameters()) {
    release_gradient(parameter);
    if (parameter.leaf.defined()) parameter.leaf.mutable_grad() = at::Tensor();
  }
  return dropped.second.is_completed() ? dropped.first : dropped.second;
}

} // namespace tessera::internal
