#include <tessera/fsdp/gradients/group_gradients.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/real.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/variable.h>

#include <fmt/format.h>

#include <algorithm>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/error_text.h>
#include <tessera/base/tensor_over.h>
#include <tessera/fsdp/gradients/gradient_layout.h>
#include <tessera/fsdp/gradients/loss_scale_watch.h>
#include <tessera/fsdp/gradients/unreduced_gradient.h>
#include <tessera/fsdp/group/parallel_parameter.h>
#include <tessera/fsdp/group/profiler_range.h>
#include <tessera/fsdp/group/step_recorder.h>

namespace tessera::internal {

namespace {

at::Tensor make_gradient(at::Tensor local, const ShardedParameter& parameter, const SpecPtr& spec = nullptr) {
  auto meta = c10::make_intrusive<DTensorMeta>(std::move(local), spec ? spec : parameter.spec);
  meta->provenance.name = parameter.gradient_name;
  return make_dtensor(std::move(meta));
}

/// How the own gradients of the ranks lie that all have the parameter whole: what they are to become, in place of what each has.
SpecPtr own_gradient_spec(const Spec& parameter, bool adds) {
  auto placements = parameter.placements();
  for (auto& each : placements) {
    if (is_replicate(each)) each = Partial{adds ? Partial::Op::kSum : Partial::Op::kAvg};
  }
  return Spec::intern(parameter.mesh(), placements, parameter.sizes(), parameter.dtype(), parameter.strides());
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

/// The `numel` reduced elements from `offset` on that are this rank's part of a parameter: of its shape where that costs nothing.
at::Tensor part_of(const at::Tensor& reduced, const ShardedParameter& parameter, int64_t offset, int64_t numel) {
  const auto dtype = reduced.scalar_type();
  if (dtype != parameter.spec->dtype() || !reduced.is_contiguous()) return reduced.narrow(0, offset, numel);
  const auto bytes = (reduced.storage_offset() + offset) * static_cast<int64_t>(reduced.element_size());
  return tensor_over(reduced.storage(), bytes, parameter.spec->local_sizes(), dtype, {}, parameter.strides.shard());
}

/// Whether a gradient lies as the parameter does, or, if it `may_be_own`, as that which no rank has reduced.
bool is_sharded_as(const ShardedParameter& parameter, const DTensorMeta* gradient, bool may_be_own) {
  if (!gradient || gradient->spec == parameter.spec) return gradient != nullptr;
  const Spec &spec = *gradient->spec, &own = *parameter.spec;
  const auto lies_alike = [&](const Placement& is, const Placement& of_parameter) {
    return is == of_parameter || (may_be_own && is_replicate(of_parameter) && is_partial(is));
  };
  return spec.mesh() == own.mesh() && std::ranges::equal(spec.placements(), own.placements(), lies_alike) &&
         spec.sizes() == own.sizes() && spec.dtype() == own.dtype();
}

void check_can_be_added(const DTensorMeta& sum, const DTensorMeta& added, const ReadyGradient& ready) {
  TORCH_CHECK(sum.spec == added.spec || sum.spec->placements() == added.spec->placements(), "the gradient of ",
              ready.group->full_name(ready.index), " lies as ", to_string(sum.spec->placements()), ", and another one as ",
              to_string(added.spec->placements()),
              ": one is reduced and one is a rank's own (set_keeps_own_gradients), which cannot be added");
}

} // namespace

void add(ReadyGradient& sum, const ReadyGradient& part) {
  const auto &meta = *dtensor_meta(sum.value), &other = *dtensor_meta(part.value);
  check_can_be_added(meta, other, sum);
  sum.value = make_gradient(meta.local + other.local.to(meta.local.options()), sum.group->parameters()[sum.index], meta.spec);
}

void deliver(ReadyGradient ready) {
  const auto& parameter = ready.group->parameters()[ready.index];
  const at::Tensor tensor(parameter.tensor.lock());
  if (!tensor.defined()) return;
  const bool is_trained = tensor.requires_grad(); // one frozen since its backward still gets what is on its way
  const auto* const before = dtensor_meta(ready.value);
  const bool is_own = before && before->spec->has_partial();
  auto added = call_hooks(tensor, std::move(ready.value));
  if (is_trained && !tensor.requires_grad()) return; // a hook froze it
  const auto* meta = dtensor_meta(added);
  TORCH_CHECK(is_sharded_as(parameter, meta, is_own), "a hook on the sharded parameter ", ready.group->full_name(ready.index),
              " returned a gradient that is not sharded as the parameter is");
  auto& sum = reduced_gradient(tensor);
  if (sum.defined()) {
    auto* sum_meta = dtensor_meta(sum);
    TORCH_CHECK(is_sharded_as(parameter, sum_meta, is_own), "the gradient of ", ready.group->full_name(ready.index),
                " was replaced by a tensor that is not sharded as the parameter is");
    check_can_be_added(*sum_meta, *meta, ready);
    sum_meta->local.add_(meta->local.to(sum_meta->local.device())); // a program's may be on the device
  } else {
    const bool is_kept = added.use_count() > 1; // by a hook, whose tensor the next backward must not change
    sum = is_kept ? make_gradient(meta->local.clone(), parameter, meta->spec) : std::move(added);
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

std::string GroupGradients::label() const {
  return group_.label() + plan_.others + (settings.divide_factor ? fmt::format(" divided by {}", *settings.divide_factor) : "");
}

void GroupGradients::set_divide_factor(double factor) {
  // What waits for its all-reduce is a sum or a mean along the shard axis, and is divided at the end, in fp16 partly before.
  const auto now = division_of(settings, group_.stages(), plan_.dtype);
  const bool fits = now.adds() && now.early() == GradientDivision{factor, plan_.dtype}.early();
  const bool differs = is_reducing() ? settings.divide_factor != factor : reduction_.is_parked() && !fits;
  TORCH_CHECK(!differs, "set_gradient_divide_factor: gradients of ", group_.label(),
              " are still being reduced, with another factor: set it before the first backward of a gradient accumulation");
  settings.divide_factor = factor;
}

bool GroupGradients::reduces_alone() const {
  return settings.keeps_own || (group_.stages().reductions.empty() && !settings.all_reduce_hook);
}

at::ScalarType reduce_dtype_of(const ParameterGroup& group, const std::vector<bool>& takes_part) {
  const auto& policy = group.options().mixed_precision;
  std::optional<at::ScalarType> dtype = policy.reduce_dtype;
  for (size_t i = 0; i < takes_part.size(); ++i) {
    if (!takes_part[i]) continue;
    const auto own = group.parameters()[i].forward.dtype;
    if (policy.reduce_dtype && !at::isComplexType(own)) continue;
    dtype = dtype ? c10::promoteTypes(*dtype, own) : own;
  }
  return dtype.value_or(at::kFloat);
}

std::optional<at::ScalarType> GroupGradients::common_dtype() const {
  std::optional<at::ScalarType> dtype;
  for (size_t i = 0; i < plan_.takes_part.size(); ++i) {
    if (!plan_.takes_part[i]) continue;
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
  if (takes_part == plan_.takes_part) return;
  plan_.takes_part = std::move(takes_part);
  plan_.leaves_out_any = std::find(plan_.takes_part.begin(), plan_.takes_part.end(), false) != plan_.takes_part.end();
  plan_.others.clear();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (plan_.takes_part[i] || !parameters[i].accumulator) continue;
    plan_.others += (plan_.others.empty() ? " without " : ", ") + group_.full_name(i);
  }
  plan_.layout = plan_reduce(group_.layout(), plan_.takes_part);
  plan_.dtype = reduce_dtype_of(group_, plan_.takes_part);
  plan_.extension = make_reduction_extension(group_, plan_.takes_part, plan_.layout, plan_.dtype);
}

const std::shared_ptr<ReductionExtension>& GroupGradients::reduction_extension() {
  if (can_change_layout()) prepare_layout();
  return plan_.extension;
}

void GroupGradients::prepare_buffer() {
  if (can_change_layout()) prepare_layout();
  if (!reduces_alone()) buffer_.allocate(plan_.layout, plan_.dtype);
}

void GroupGradients::land(size_t index, const at::Tensor& gradient, double weight) {
  if (!gradient.defined() || !is_trained(group_.parameters()[index])) return; // frozen since its forward
  prepare_buffer();
  TORCH_CHECK_NOT_IMPLEMENTED(!gradient.is_sparse(), "the parameter ", group_.full_name(index),
                              " has a sparse gradient, which fully_shard cannot reduce; build its embedding with sparse(false)");
  TORCH_CHECK(
      plan_.takes_part[index], "the parameter ", group_.full_name(index),
      " began to require a gradient while gradients of its group were being accumulated or reduced; run a synchronized backward "
      "first");
  const bool is_blank = weight == 0, alone = reduces_alone();
  at::Tensor product;
  // In the dtype of the reduction, where that holds more: the weight may be large.
  if (weight != 1 && !is_blank) product = gradient.to(c10::promoteTypes(gradient.scalar_type(), plan_.dtype)) * weight;
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
  pending_.land(index, is_blank);
  landed_.land(index);
}

void GroupGradients::join_reduction() { must_reduce_ = must_reduce_ || trains_any(group_); }

void GroupGradients::keep_unreduced() {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  buffer_.flush();
  landed_.forget();
  must_reduce_ = false;
}

ReductionCall GroupGradients::call_of(std::vector<bool> used) const {
  return {.label = label(), .dtype = plan_.dtype, .used = std::move(used), .extension = plan_.extension};
}

void GroupGradients::start_reduce(ReadyGradients& ready) {
  TORCH_INTERNAL_ASSERT(has_pending());
  LossScaleWatch::instance().see(group_, plan_.takes_part);
  const ProfilerRange range("reduce_scatter", group_);
  const bool joins = std::exchange(must_reduce_, false);
  const bool is_left_to_the_last = reduction_.is_parked() && !group_.stages().reduce_scatter();
  if (!pending_.any() && (!joins || is_left_to_the_last)) {
    landed_.forget();
    // Nothing is used in this backward; the flags know of those before.
    reduction_.resume(call_of(std::vector<bool>(group_.parameters().size())));
    return call_hook_early();
  }
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!pending_.any()) prepare_buffer();
  landed_.forget();
  auto used = pending_.take();
  if (reduces_alone()) return finish_alone(ready);
  auto input = buffer_.take(plan_.takes_part, used);
  reduction_.start(std::move(input), call_of(std::move(used)));
  call_hook_early();
}

/// On a stream of its own it is part of the reduction, beside the backward.
void GroupGradients::call_hook_early() {
  if (!settings.all_reduce_hook || !settings.hook_stream) return;
  reduction_.finish_on(*settings.hook_stream, [this](const at::Tensor& sum, bool is_divided) { finish_sum(sum, is_divided); });
}

void GroupGradients::finish_reduce(ReadyGradients& ready) {
  if (!is_reducing()) return;
  const ProfilerRange range("reduce_wait", group_);
  const at::NoGradGuard no_grad;
  auto done = reduction_.finish();
  if (!done) return;
  if (!done->is_finished) {
    const StreamScope scope(settings.all_reduce_hook ? settings.hook_stream : std::nullopt);
    finish_sum(done->value, done->is_divided);
  }
  const auto rank = static_cast<size_t>(group_.roles().shard_rank());
  const auto& parameters = group_.parameters();
  const auto gradients = common_dtype() ? done->value.to(*common_dtype()) : done->value;
  const size_t first = ready.size();
  ready.reserve(ready.size() + parameters.size());
  const auto used = used_anywhere(done->value, std::move(done->used));
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!plan_.takes_part[i]) continue;
    release_gradient(parameters[i]);
    if (!used[i]) continue; // its gradient stays as it is
    const int64_t numel = group_.layout().parameters[i].pieces[rank].numel;
    ready.push_back(make_ready(i, part_of(gradients, parameters[i], plan_.layout.offsets[i][rank], numel)));
  }
  offload(ready, first);
}

void GroupGradients::finish_sum(const at::Tensor& reduced, bool is_divided) const {
  const auto division = division_of(settings, group_.stages(), plan_.dtype);
  const bool divides = division.adds() && !is_divided;
  if (!divides && !settings.all_reduce_hook) return;
  const auto gradients = reduced.narrow(0, 0, plan_.layout.used_offset);
  if (divides && !settings.divide_factor)
    gradients.div_(division.late()); // a hook sees the mean, however the collectives have come to it
  if (settings.all_reduce_hook) {
    zero_gaps(reduced);
    const ProgramCall program(group_.mutex(), "a hook of set_all_reduce_hook");
    settings.all_reduce_hook(gradients);
  }
  if (divides && settings.divide_factor) gradients.div_(division.late());
}

/// Nothing has written what lies between the pieces, and a hook may sum all up.
void GroupGradients::zero_gaps(const at::Tensor& reduced) const {
  const auto rank = static_cast<size_t>(group_.roles().shard_rank());
  CopyList list;
  int64_t end = 0;
  const auto zero_to = [&](int64_t begin) {
    if (begin > end) list.zero(reduced.narrow(0, end, begin - end));
  };
  for (size_t i = 0; i < plan_.takes_part.size(); ++i) {
    if (!plan_.takes_part[i]) continue;
    const int64_t offset = plan_.layout.offsets[i][rank];
    zero_to(offset);
    end = offset + group_.layout().parameters[i].pieces[rank].numel;
  }
  zero_to(plan_.layout.used_offset);
  list.run();
}

/// The parameters that this rank used, and those that another one did: the reduced flags say so. They are only read where it
/// matters, because on a device that waits for the reduction.
std::vector<bool> GroupGradients::used_anywhere(const at::Tensor& reduced, std::vector<bool> used) const {
  bool asks = false;
  for (size_t i = 0; i < used.size(); ++i) asks = asks || (plan_.takes_part[i] && !used[i]);
  if (!asks || reduced.is_meta()) return used;
  const auto flags = reduced.narrow(0, plan_.layout.used_offset, static_cast<int64_t>(used.size())).to(at::kCPU, at::kDouble);
  for (size_t i = 0; i < used.size(); ++i) used[i] = used[i] || flags.const_data_ptr<double>()[i] != 0;
  return used;
}

void GroupGradients::offload(ReadyGradients& ready, size_t first) const {
  if (!group_.memory() || first == ready.size()) return;
  std::vector<at::Tensor> locals;
  for (size_t i = first; i < ready.size(); ++i) locals.push_back(dtensor_meta(ready[i].value)->local);
  MovedTensors moved;
  const auto moved_to = [&](at::Tensor local, const ReadyGradient& gradient) { // lies as it did: it may be this rank's own
    return make_gradient(std::move(local), group_.parameters()[gradient.index], dtensor_meta(gradient.value)->spec);
  };
  try {
    moved = start_move(*group_.memory(), locals);
  } catch (const std::exception& error) { // the other ranks go on with the backward: the gradients are in the host's memory
    group_.memory()->delayed_failure().note(error_text(error));
    for (size_t i = first; i < ready.size(); ++i) ready[i].value = moved_to(locals[i - first].to(at::kCPU), ready[i]);
    return;
  }
  const std::shared_ptr<PendingCopy> copy = std::move(moved.copy);
  for (size_t i = first; i < ready.size(); ++i) {
    ready[i].value = moved_to(std::move(moved.tensors[i - first]), ready[i]);
    ready[i].copy = copy;
  }
  const bool frees_host_memory = locals[0].is_cpu();
  locals.clear();
  if (frees_host_memory) release_freed_memory();
}

void GroupGradients::withhold_unreduced() const {
  const at::NoGradGuard no_grad;
  auto unreduced = pending_.all();
  if (const auto* const used = reduction_.used()) {
    for (size_t i = 0; i < unreduced.size(); ++i) unreduced[i] = unreduced[i] || (*used)[i];
  }
  if (const auto* const parked = reduction_.parked()) unreduced = used_anywhere(*parked, std::move(unreduced));
  for (size_t i = 0; i < unreduced.size(); ++i) {
    if (unreduced[i]) withhold_gradient(group_.parameters()[i]);
  }
}

void GroupGradients::add_whole(size_t index, const at::Tensor& gradient) {
  whole_.resize(group_.parameters().size());
  auto& sum = whole_[index];
  if (!sum.defined()) return void(sum = gradient);
  const auto dtype = c10::promoteTypes(sum.scalar_type(), plan_.dtype); // as in a reduce buffer, and never less than it has
  sum = (sum.scalar_type() == dtype ? sum : sum.to(dtype)).add_(gradient);
}

void GroupGradients::finish_alone(ReadyGradients& ready) {
  const size_t first = ready.size();
  ready.reserve(ready.size() + whole_.size());
  whole_.resize(plan_.takes_part.size());
  for (size_t i = 0; i < whole_.size(); ++i) {
    if (!plan_.takes_part[i]) continue;
    release_gradient(group_.parameters()[i]);
    if (!whole_[i].defined()) continue; // not used, or by a stand-in alone
    auto gradient = std::exchange(whole_[i], at::Tensor());
    if (settings.divide_factor)
      gradient = gradient.to(c10::promoteTypes(gradient.scalar_type(), plan_.dtype)).div(*settings.divide_factor);
    ready.push_back(make_ready(i, gradient));
  }
  offload(ready, first);
}

ReadyGradient GroupGradients::make_ready(size_t index, const at::Tensor& reduced) const {
  const auto& parameter = group_.parameters()[index];
  const auto& spec = parameter.spec;
  const auto& sizes = spec->local_sizes();
  const auto strides = parameter.strides.shard();
  at::Tensor local = reduced;
  if (reduced.sizes() != c10::IntArrayRef(sizes))
    local = strides.empty() ? reduced.reshape(sizes) : reduced.as_strided(sizes, strides);
  if (local.is_complex() && !at::isComplexType(spec->dtype())) local = at::real(local);
  if (local.scalar_type() != spec->dtype()) local = local.to(spec->dtype());
  return {.group = group_.shared_from_this(),
          .index = index,
          .value = make_gradient(std::move(local), parameter,
                                 settings.keeps_own ? own_gradient_spec(*spec, settings.divide_factor.has_value()) : nullptr),
          .is_term = gives_terms(parameter)};
}

Work GroupGradients::discard() {
  auto left = reduction_.discard();
  buffer_.drop();
  whole_.clear();
  pending_.take();
  must_reduce_ = false;
  landed_.forget();
  for (auto& parameter : group_.parameters()) {
    release_gradient(parameter);
    if (parameter.leaf.defined()) parameter.leaf.mutable_grad() = at::Tensor();
  }
  return left;
}

} // namespace tessera::internal
