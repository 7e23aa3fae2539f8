#include <tessera/fsdp/parameter_group.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <tessera/dtensor/prefetch.h>
#include <tessera/fsdp/group_gradients.h>

namespace tessera::fsdp_internal {

namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

at::ScalarType unsharded_dtype(const at::Tensor& parameter, const MixedPrecisionPolicy& policy) {
  return parameter.is_floating_point() && policy.param_dtype ? *policy.param_dtype : parameter.scalar_type();
}

/// `numel` elements of `bytes` from `byte_offset`, as a flat view.
at::Tensor flat_view(const at::Tensor& bytes, int64_t byte_offset, int64_t numel, at::ScalarType dtype) {
  return bytes.narrow(0, numel > 0 ? byte_offset : 0, numel * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
}

/// Gives a parameter its share in its group, as a tensor hook. Autograd's part of a tensor goes with the last reference to it;
/// the backend meta would stay as long as the group's own weak reference. The hook also meets gradients of a graph from before.
void own(const at::Tensor& parameter, std::shared_ptr<ParameterGroup> group, size_t index) {
  auto* autograd = torch::autograd::impl::materialize_autograd_meta(parameter);
  if (!autograd->cpp_hooks_list_) torch::autograd::impl::create_cpp_hook(parameter);
  autograd->cpp_hooks_list_->push_back([group = std::move(group), index](const at::TensorBase& gradient) {
    TORCH_CHECK(!gradient.defined() || dtensor_meta(gradient), "the gradient of ", group->full_name(index),
                " comes from a forward that ran before fully_shard: run the forward again");
    return at::TensorBase();
  });
}

} // namespace

std::string ParameterName::to_string() const {
  const auto group = group_.lock();
  return about_ + (group ? group->full_name(index_) : "a module that is gone");
}

ParameterGroup::ParameterGroup(std::string label, const MeshAxes& axes, const FullyShardOptions& options,
                               std::shared_ptr<BlockCache> cache)
    : label_(std::move(label)), axes_(axes), options_(options), cache_(std::move(cache)) {}

ParameterGroup::~ParameterGroup() {
  if (storage_) storage_->forget_group();
  for (const auto& parameter : parameters_) {
    if (parameter.meta) parameter.meta->group = nullptr;
  }
}

void ParameterGroup::shard(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names) {
  const at::NoGradGuard no_grad;
  std::vector<ParameterShape> shapes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    shapes.push_back({names[i], tensors[i].sizes().vec(), unsharded_dtype(tensors[i], options_.mixed_precision)});
    casts_ = casts_ || shapes.back().unsharded_dtype != tensors[i].scalar_type();
  }
  layout_ = plan_layout(options_.layout, shapes, axes_.shard_ranks());
  copies_ = axes_.shard_ranks() > 1 || casts_ || !layout_.gathers_in_place;
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto spec =
        Spec::intern(axes_.mesh(), axes_.placements(layout_.parameters[i].placement), shapes[i].sizes, tensors[i].scalar_type());
    parameters_.push_back({names[i],
                           c10::weak_intrusive_ptr<c10::TensorImpl>(tensors[i].getIntrusivePtr()),
                           {},
                           {},
                           {},
                           nullptr,
                           std::move(spec),
                           {},
                           c10::make_intrusive<ParameterName>("the gradient of ", weak_from_this(), i),
                           MemoryRange::of(tensors[i]),
                           {}});
    own(tensors[i], shared_from_this(), i);
  }
  const bool on_meta = tensors[0].is_meta();
  std::vector<at::Tensor> values; // keep the storage when the parameters let go of it
  for (const auto& tensor : tensors) values.push_back(tensor.detach());
  allocate_shard(on_meta ? c10::Device(c10::kMeta) : axes_.mesh().device());
  if (!on_meta) {
    fill_shard(values);
    make_leaves();
  }
  gradients_ = std::make_unique<GroupGradients>(*this);
}

void ParameterGroup::materialize() {
  if (!shard_.is_meta()) return;
  const at::NoGradGuard no_grad;
  allocate_shard(axes_.mesh().device());
  make_leaves();
}

void ParameterGroup::allocate_shard(c10::Device device) {
  // Without a cast the shard is the all-gather's input and shares its offsets; otherwise the locals are packed on their own.
  const auto rank = static_cast<size_t>(axes_.shard_rank());
  int64_t packed = 0;
  master_offsets_.clear();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& piece = layout_.parameters[i].pieces[rank];
    master_offsets_.push_back(casts_ ? packed : piece.shard_offset);
    packed += round_up(piece.numel * static_cast<int64_t>(c10::elementSize(parameters_[i].spec->dtype())), kParameterAlignment);
  }
  shard_ =
      at::zeros({casts_ ? packed : layout_.shard_bytes + layout_.replicated_bytes}, at::TensorOptions(at::kByte).device(device));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    const auto& piece = layout_.parameters[i].pieces[rank];
    parameter.local =
        flat_view(shard_, master_offsets_[i], piece.numel, parameter.spec->dtype()).view(parameter.spec->local_sizes());
    const at::Tensor tensor(parameter.tensor.lock());
    parameter.meta = c10::make_intrusive<ParameterMeta>(parameter.local, parameter.spec, this, i);
    parameter.meta->name = c10::make_intrusive<ParameterName>("the parameter ", weak_from_this(), i);
    become_dtensor(tensor, parameter.meta, c10::DispatchKeySet(kTouchKey));
  }
}

void ParameterGroup::fill_shard(const std::vector<at::Tensor>& values) {
  const auto rank = static_cast<size_t>(axes_.shard_rank());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& piece = layout_.parameters[i].pieces[rank];
    if (piece.numel == 0) continue;
    parameters_[i].local.view({-1}).copy_(values[i].reshape({-1}).narrow(0, piece.begin, piece.numel));
  }
}

void ParameterGroup::make_leaves() {
  storage_ = c10::make_intrusive<UnshardedStorage>(shard_.device(), this);
  if (!copies_) { // the leaves alias the shard
    auto owner = std::make_unique<c10::Storage>(shard_.storage());
    void* data = owner->mutable_data();
    storage_->fill({data, owner.release(), [](void* context) { delete static_cast<c10::Storage*>(context); }, shard_.device()},
                   layout_.unsharded_bytes);
    state_ = State::kUnsharded;
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    const at::Tensor tensor(parameter.tensor.lock());
    const auto dtype = unsharded_dtype(tensor, options_.mixed_precision);
    // A leaf that aliases the shard is always valid: nothing needs to see its reads.
    const auto keys = copies_ ? c10::DispatchKeySet(kTouchKey) : c10::DispatchKeySet();
    const c10::Storage storage(storage_);
    parameter.leaf = tensor_over(storage, layout_.parameters[i].unsharded_offset, tensor.sizes(), dtype, keys);
    parameter.detached_leaf = tensor_over(storage, layout_.parameters[i].unsharded_offset, tensor.sizes(), dtype, keys);
    parameter.leaf.set_requires_grad(tensor.requires_grad());
    parameter.accumulator = redirect_gradients(tensor, parameter.leaf, weak_from_this(), i);
  }
}

at::Tensor ParameterGroup::unsharded_bytes_tensor() const {
  return tensor_over(c10::Storage(storage_), 0, {layout_.unsharded_bytes}, at::kByte);
}

void ParameterGroup::expect_gradient(size_t index, uint64_t forward) {
  if (forward != touched_forward_) {
    touched_forward_ = forward;
    touched_count_ = 0;
    for (auto& parameter : parameters_) parameter.touched = false;
  }
  if (!parameters_[index].touched) ++touched_count_;
  parameters_[index].touched = true;
}

void ParameterGroup::check_parameters_alive() const {
  for (const auto& parameter : parameters_) {
    TORCH_CHECK(!parameter.tensor.expired(), "the sharded parameter ", parameter.name, " of ", label_,
                " is gone: the module's parameters changed after fully_shard. Replace parameters first, then shard, or copy new "
                "values with parameter.copy_(full_tensor)");
  }
}

void ParameterGroup::prefetch_parameters() const {
  for (const auto& parameter : parameters_) {
    prefetch(parameter.tensor._unsafe_get_target());
    prefetch(parameter.leaf.unsafeGetTensorImpl());
    prefetch(parameter.meta.get());
    prefetch(parameter.accumulator.get());
  }
}

void ParameterGroup::note_write(const at::Tensor& written, size_t index) {
  ++dtensor_writes_;
  const auto& parameter = parameters_[index];
  if (written.unsafeGetTensorImpl() != parameter.tensor._unsafe_get_target()) return;
  for (const auto* tensor : {&parameter.leaf, &parameter.detached_leaf, &parameter.dtensor_leaf}) {
    if (tensor->defined()) tensor->unsafeGetTensorImpl()->bump_version();
  }
}

void ParameterGroup::start_gather() {
  if (state_ != State::kSharded) return;
  TORCH_CHECK(storage_, "the parameters of ", label_, " (", parameters_[0].name,
              ", …) are on the meta device: call tessera::materialize before they are gathered");
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  storage_->fill(cache_->allocate(layout_.unsharded_bytes), layout_.unsharded_bytes);
  const at::Tensor unsharded = unsharded_bytes_tensor();
  fill_replicated(unsharded);
  const int64_t gathered_bytes = layout_.shard_bytes * axes_.shard_ranks();
  at::Tensor output;
  if (layout_.gathers_in_place) {
    output = unsharded.narrow(0, 0, gathered_bytes);
  } else {
    const c10::Storage storage(c10::Storage::use_byte_size_t(), gathered_bytes, cache_->allocate(gathered_bytes));
    gather_output_ = output = tensor_over(storage, 0, {gathered_bytes}, at::kByte);
  }
  at::Tensor input;
  if (casts_) {
    input = output.narrow(0, axes_.shard_rank() * layout_.shard_bytes, layout_.shard_bytes);
    cast_into(input);
  } else {
    input = shard_.narrow(0, 0, layout_.shard_bytes);
  }
  if (axes_.all_gather()) {
    gather_ = axes_.all_gather()->all_gather_into(output, input, label_);
  } else if (!casts_) {
    output.copy_(input);
  }
  gathered_version_ = shard_version();
  state_ = State::kGathering;
}

void ParameterGroup::finish_gather() {
  if (state_ != State::kGathering) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  gather_.wait();
  if (gather_output_.defined()) copy_out(std::exchange(gather_output_, at::Tensor()));
  state_ = State::kUnsharded;
}

void ParameterGroup::fill_replicated(const at::Tensor& unsharded) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& layout = layout_.parameters[i];
    if (!layout.is_replicated()) continue;
    flat_view(unsharded, layout.unsharded_offset, 1, parameters_[i].leaf.scalar_type()).copy_(parameters_[i].local.view({-1}));
  }
}

void ParameterGroup::cast_into(const at::Tensor& destination) {
  const auto rank = static_cast<size_t>(axes_.shard_rank());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& piece = layout_.parameters[i].pieces[rank];
    if (piece.numel == 0 || layout_.parameters[i].is_replicated()) continue;
    flat_view(destination, piece.shard_offset, piece.numel, parameters_[i].leaf.scalar_type())
        .copy_(parameters_[i].local.view({-1}));
  }
}

void ParameterGroup::copy_out(const at::Tensor& gathered) {
  const at::Tensor output = unsharded_bytes_tensor();
  const auto by_rank = gathered.view({axes_.shard_ranks(), layout_.shard_bytes});
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = layout_.parameters[i];
    const auto item = static_cast<int64_t>(parameters_[i].leaf.element_size());
    const int64_t bytes = parameters_[i].leaf.numel() * item;
    if (bytes == 0 || parameter.is_replicated()) continue;
    const int64_t part = parameter.pieces[0].numel * item;
    const auto whole = output.narrow(0, parameter.unsharded_offset, bytes);
    const int64_t full_ranks = bytes / part; // the ranks before the uneven tail
    whole.narrow(0, 0, full_ranks * part)
        .view({full_ranks, part})
        .copy_(by_rank.narrow(0, 0, full_ranks).narrow(1, parameter.pieces[0].shard_offset, part));
    if (const int64_t rest = bytes - full_ranks * part; rest > 0) {
      whole.narrow(0, full_ranks * part, rest).copy_(by_rank[full_ranks].narrow(0, parameter.pieces[0].shard_offset, rest));
    }
  }
}

void ParameterGroup::reshard() {
  if (!copies_ || state_ == State::kSharded) return;
  finish_gather();
  storage_->release();
  state_ = State::kSharded;
}

void ParameterGroup::write_back() {
  if (!copies_ || !is_unsharded()) return;
  const at::NoGradGuard no_grad;
  const auto rank = static_cast<size_t>(axes_.shard_rank());
  const at::Tensor output = unsharded_bytes_tensor();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = layout_.parameters[i];
    const auto& piece = parameter.pieces[rank];
    if (piece.numel == 0) continue;
    const auto dtype = parameters_[i].leaf.scalar_type();
    const int64_t begin = parameter.unsharded_offset + piece.begin * static_cast<int64_t>(c10::elementSize(dtype));
    const auto written = flat_view(output, begin, piece.numel, dtype);
    const auto local = parameters_[i].local.view({-1});
    // What a cast only rounded keeps its value.
    local.copy_(dtype == local.scalar_type() ? written
                                             : at::where(local.to(dtype).eq(written), local, written.to(local.scalar_type())));
  }
  gathered_version_ = shard_version();
}

} // namespace tessera::fsdp_internal
