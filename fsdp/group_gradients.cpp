#include <tessera/fsdp/group_gradients.h>

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

#include <tessera/dtensor/view_replay.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/schedule.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera::fsdp_internal {

namespace {

class LeafHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  LeafHook(std::weak_ptr<ParameterGroup> group, size_t index) : group_(std::move(group)), index_(index) {}
  void operator()(const torch::autograd::Variable& leaf) override {
    at::Tensor gradient;
    std::swap(gradient, leaf.mutable_grad());
    const auto group = group_.lock();
    if (!group || !gradient.defined()) return;
    TORCH_CHECK(!gradient.requires_grad(), "backward(create_graph=true) reached the sharded parameter ", group->full_name(index_),
                ": its gradient is reduced over ranks and cannot be differentiated again. Take the gradient of the inputs with "
                "torch::autograd::grad(..., create_graph=true) and call backward() without create_graph on what is made of it");
    const KeepViewReplay keep;
    schedule_of(*group).land(*group, index_, gradient);
  }

 private:
  std::weak_ptr<ParameterGroup> group_;
  size_t index_;
};

at::Tensor make_gradient(at::Tensor local, const ShardedParameter& parameter) {
  auto meta = c10::make_intrusive<DTensorMeta>(std::move(local), parameter.spec);
  meta->name = parameter.gradient_name;
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

/// Refuses torch::autograd::grad over a sharded parameter, which would return the gradient of this rank's data alone.
class CaptureCheck final : public torch::autograd::FunctionPreHook {
 public:
  CaptureCheck(std::weak_ptr<ParameterGroup> group, size_t index, const torch::autograd::Node* accumulator)
      : group_(std::move(group)), index_(index), accumulator_(accumulator) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
    if (C10_LIKELY(!tasks || tasks->empty())) return gradients;
    const auto found = tasks->find(const_cast<torch::autograd::Node*>(accumulator_));
    const auto group = group_.lock();
    TORCH_CHECK(!group || found == tasks->end() || !found->second.captures_, "torch::autograd::grad over the sharded parameter ",
                group->full_name(index_),
                " would return a gradient of this rank's data alone; call backward() (with "
                "`inputs`, if only some gradients are wanted) and read parameter.grad()");
    return gradients;
  }

 private:
  std::weak_ptr<ParameterGroup> group_;
  size_t index_;
  const torch::autograd::Node* accumulator_;
};

/// The DTensor gradients of ops that read the parameter as a DTensor.
class DTensorLeafHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  DTensorLeafHook(std::weak_ptr<ParameterGroup> group, size_t index) : group_(std::move(group)), index_(index) {}
  void operator()(const torch::autograd::Variable& leaf) override {
    at::Tensor gradient;
    std::swap(gradient, leaf.mutable_grad());
    if (const auto group = group_.lock()) schedule_of(*group).land_sharded(*group, index_, std::move(gradient));
  }

 private:
  std::weak_ptr<ParameterGroup> group_;
  size_t index_;
};

/// Complex numbers as twice as many real ones: what the communicators reduce.
at::Tensor as_real(const at::Tensor& flat) { return flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat; }

} // namespace

NodeReference redirect_gradients(const at::Tensor& parameter, const at::Tensor& leaf, const std::weak_ptr<ParameterGroup>& group,
                                 size_t index) {
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<LeafHook>(group, index));
  if (!leaf.is_floating_point() && !leaf.is_complex()) return nullptr;
  const bool required = leaf.requires_grad();
  leaf.set_requires_grad(true);
  auto accumulator = torch::autograd::impl::grad_accumulator(leaf);
  leaf.set_requires_grad(required);
  torch::autograd::impl::add_hook(leaf, std::make_unique<CaptureCheck>(group, index, accumulator.get()));
  torch::autograd::impl::set_grad_accumulator(parameter, weak(accumulator));
  return accumulator;
}

at::Tensor make_dtensor_leaf(const at::Tensor& parameter, const std::weak_ptr<ParameterGroup>& group, size_t index) {
  const auto* meta = parameter_meta(parameter);
  auto leaf = make_dtensor(meta->local, meta->spec);
  leaf.set_requires_grad(true);
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<DTensorLeafHook>(group, index));
  return leaf;
}

bool GroupGradients::requires_grad(size_t index) const {
  const auto& tensor = group_.parameters()[index].tensor; // read in place: a reference would cost more than the answer
  return !tensor.expired() && tensor._unsafe_get_target()->requires_grad();
}

std::string GroupGradients::label() const {
  return group_.label() + label_ + (divide_factor_ ? fmt::format(" divided by {}", *divide_factor_) : "");
}

void GroupGradients::set_divide_factor(double factor) {
  // What waits for its all-reduce is a sum or a mean along the shard axis, and is divided at the end.
  const bool differs = reducing_ ? divide_factor_ != factor : partial_.defined() && !divide_factor_;
  TORCH_CHECK(!differs, "set_gradient_divide_factor: gradients of ", group_.label(),
              " are still being reduced, with another factor: set it before the first backward of a gradient accumulation");
  divide_factor_ = factor;
}

bool GroupGradients::reduces_alone() const { return !group_.axes().reduce_scatter() && !group_.axes().all_reduce(); }

at::ScalarType GroupGradients::choose_reduce_dtype() const {
  const auto& policy = group_.options().mixed_precision;
  std::optional<at::ScalarType> dtype = policy.reduce_dtype;
  for (size_t i = 0; i < takes_part_.size(); ++i) {
    if (!takes_part_[i]) continue;
    const auto own = group_.parameters()[i].leaf.scalar_type();
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
  std::vector<bool> takes_part;
  takes_part.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) takes_part.push_back(requires_grad(i));
  if (takes_part == takes_part_) return;
  takes_part_ = std::move(takes_part);
  label_.clear();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (takes_part_[i] || !parameters[i].accumulator) continue;
    label_ += (label_.empty() ? " without " : ", ") + parameters[i].name;
  }
  layout_ = plan_reduce(group_.layout(), takes_part_);
  dtype_ = choose_reduce_dtype();
  pending_.resize(parameters.size());
  landed_.resize(parameters.size());
}

void GroupGradients::prepare_buffer() {
  // What is on its way, or waits for an all-reduce, lies as the layout says.
  if (pending_count_ == 0 && landed_count_ == 0 && !reducing_ && !partial_.defined()) prepare_layout();
  if (buffer_.defined() || reduces_alone()) return;
  const int64_t numel = layout_.chunk_numel * group_.axes().shard_ranks();
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype_));
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, group_.cache().allocate(bytes));
  buffer_ = tensor_over(storage, 0, {numel}, dtype_);
}

void GroupGradients::land(size_t index, const at::Tensor& gradient) {
  if (!gradient.defined() || !requires_grad(index)) return; // frozen since its forward
  const at::NoGradGuard no_grad;
  prepare_buffer();
  TORCH_CHECK_NOT_IMPLEMENTED(!gradient.is_sparse(), "the parameter ", group_.full_name(index),
                              " has a sparse gradient, which fully_shard cannot reduce; build its embedding with sparse(false)");
  TORCH_CHECK(
      takes_part_[index], "the parameter ", group_.full_name(index),
      " began to require a gradient while gradients of its group were being accumulated or reduced; run a synchronized backward "
      "first");
  if (reduces_alone()) {
    add_whole(index, gradient);
  } else {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    copy_into_buffer(index, gradient, pending_[index]);
  }
  if (!pending_[index]) ++pending_count_;
  pending_[index] = true;
  if (!landed_[index]) ++landed_count_;
  landed_[index] = true;
}

void GroupGradients::copy_into_buffer(size_t index, const at::Tensor& gradient, bool add) {
  const auto flat = gradient.reshape({-1});
  const auto& pieces = group_.layout().parameters[index].pieces;
  for (size_t rank = 0; rank < pieces.size(); ++rank) {
    if (pieces[rank].numel == 0) continue;
    const int64_t offset = static_cast<int64_t>(rank) * layout_.chunk_numel + layout_.offsets[index][rank];
    auto destination = buffer_.narrow(0, offset, pieces[rank].numel);
    const auto source = flat.narrow(0, pieces[rank].begin, pieces[rank].numel);
    if (add) {
      destination.add_(source);
    } else {
      destination.copy_(source);
    }
  }
}

bool GroupGradients::is_complete() const { return landed_count_ > 0 && landed_count_ >= group_.touched_count(); }

void GroupGradients::begin_backward() {
  std::fill(landed_.begin(), landed_.end(), false);
  landed_count_ = 0;
}

void GroupGradients::write_used_flags() {
  const auto& parameters = group_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!takes_part_[i] || pending_[i]) continue;
    for (size_t rank = 0; rank < layout_.offsets[i].size(); ++rank) {
      const int64_t offset = static_cast<int64_t>(rank) * layout_.chunk_numel + layout_.offsets[i][rank];
      buffer_.narrow(0, offset, group_.layout().parameters[i].pieces[rank].numel).zero_();
    }
  }
  const auto by_rank = buffer_.view({group_.axes().shard_ranks(), layout_.chunk_numel});
  const auto flags = by_rank.narrow(1, layout_.used_offset, static_cast<int64_t>(parameters.size()));
  flags.fill_(1);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!pending_[i]) flags.select(1, static_cast<int64_t>(i)).zero_();
  }
}

void GroupGradients::start_reduce() {
  TORCH_INTERNAL_ASSERT(!reducing_ && has_pending());
  if (pending_count_ == 0) return finish_partial();
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (buffer_.defined()) write_used_flags();
  begin_backward();
  pending_count_ = 0;
  auto used = std::exchange(pending_, std::vector<bool>(pending_.size()));
  if (reduces_alone()) return finish_alone();
  reduction_.used = std::move(used);
  reduction_.input = std::exchange(buffer_, at::Tensor());
  const auto op = divide_factor_ ? ReduceOp::kSum : ReduceOp::kAvg;
  if (const auto& communicator = group_.axes().reduce_scatter()) {
    reduction_.output = at::empty({layout_.chunk_numel}, reduction_.input.options());
    reduction_.work = communicator->reduce_scatter(as_real(reduction_.output), as_real(reduction_.input), op, label());
  } else {
    reduction_.output = reduction_.input.clone(); // the buffer goes back to the cache; gradients live as long as the user likes
  }
  reducing_ = true;
}

void GroupGradients::finish_partial() {
  begin_backward();
  reduction_.used.assign(group_.parameters().size(), false); // in this backward; the flags know of those before
  reduction_.output = std::exchange(partial_, at::Tensor());
  reducing_ = true;
}

void GroupGradients::advance_reduce() {
  if (!reducing_ || reduction_.all_reduces) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  reduction_.work.wait();
  reduction_.input = at::Tensor();
  const auto& communicator = group_.axes().all_reduce();
  if (!communicator) return;
  if (partial_.defined()) reduction_.output.add_(std::exchange(partial_, at::Tensor()));
  if (!requires_all_reduce) {
    partial_ = std::exchange(reduction_.output, at::Tensor());
    reducing_ = false;
    return;
  }
  const auto op = divide_factor_ ? ReduceOp::kSum : ReduceOp::kAvg;
  reduction_.work = communicator->all_reduce(as_real(reduction_.output), op, label());
  reduction_.all_reduces = true;
}

void GroupGradients::finish_reduce() {
  advance_reduce();
  if (!reducing_) return;
  reducing_ = false;
  const at::NoGradGuard no_grad;
  reduction_.work.wait();
  auto done = std::exchange(reduction_, Reduction());
  if (divide_factor_) done.output.narrow(0, 0, layout_.used_offset).div_(*divide_factor_);
  const auto rank = static_cast<size_t>(group_.axes().shard_rank());
  const auto& parameters = group_.parameters();
  const auto gradients = common_dtype() ? done.output.to(*common_dtype()) : done.output;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!takes_part_[i]) continue;
    // Unused here: another rank may have used it. Unused everywhere, its gradient stays as it is.
    if (!done.used[i] && done.output[layout_.used_offset + static_cast<int64_t>(i)].item<double>() == 0) continue;
    const int64_t numel = group_.layout().parameters[i].pieces[rank].numel;
    add_reduced(i, gradients.narrow(0, layout_.offsets[i][rank], numel));
  }
}

void GroupGradients::add_whole(size_t index, const at::Tensor& gradient) {
  whole_.resize(group_.parameters().size());
  auto& sum = whole_[index];
  sum = sum.defined() ? sum.add_(gradient) : gradient;
}

void GroupGradients::finish_alone() {
  for (size_t i = 0; i < whole_.size(); ++i) {
    if (!whole_[i].defined()) continue;
    const auto gradient = std::exchange(whole_[i], at::Tensor());
    add_reduced(i, divide_factor_ ? gradient.div(*divide_factor_) : gradient);
  }
}

void GroupGradients::add_reduced(size_t index, const at::Tensor& reduced) {
  const auto& parameter = group_.parameters()[index];
  const auto& spec = parameter.spec;
  const auto& sizes = spec->local_sizes();
  at::Tensor local = reduced.sizes() == c10::IntArrayRef(sizes) ? reduced : reduced.reshape(sizes);
  if (local.is_complex() && !at::isComplexType(spec->dtype())) local = at::real(local);
  if (local.scalar_type() != spec->dtype()) local = local.to(spec->dtype());
  add_sharded(index, make_gradient(std::move(local), parameter));
}

void GroupGradients::add_sharded(size_t index, at::Tensor gradient) {
  const auto& parameter = group_.parameters()[index];
  const at::Tensor tensor(parameter.tensor.lock());
  if (!tensor.defined()) return;
  auto added = call_hooks(tensor, std::move(gradient));
  const auto* meta = dtensor_meta(added);
  TORCH_CHECK(meta && meta->spec == parameter.spec, "a hook on the sharded parameter ", group_.full_name(index),
              " returned a gradient that is not sharded as the parameter is");
  auto& sum = tensor.mutable_grad();
  if (sum.defined()) {
    auto* sum_meta = dtensor_meta(sum);
    TORCH_CHECK(sum_meta && sum_meta->spec == parameter.spec, "the gradient of ", group_.full_name(index),
                " was replaced by a tensor that is not sharded as the parameter is");
    sum_meta->local.add_(meta->local);
  } else {
    const bool is_kept = added.use_count() > 1; // by a hook, whose tensor the next backward must not change
    sum = is_kept ? make_gradient(meta->local.clone(), parameter) : std::move(added);
  }
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensor)) (*hook)(tensor);
}

void GroupGradients::discard() {
  if (reducing_) reduction_.work.wait();
  reducing_ = false;
  reduction_ = Reduction();
  partial_ = at::Tensor();
  buffer_ = at::Tensor();
  whole_.clear();
  std::fill(pending_.begin(), pending_.end(), false);
  pending_count_ = 0;
  begin_backward();
  for (auto& parameter : group_.parameters()) {
    if (parameter.leaf.defined()) parameter.leaf.mutable_grad() = at::Tensor();
  }
}

} // namespace tessera::fsdp_internal
