#include <tessera/fsdp/group/parameter_group.h>

#include <ATen/ceil_div.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include <tessera/base/tensor_over.h>
#include <tessera/dtensor/tensor/prefetch.h>
#include <tessera/fsdp/buffers/flat_views.h>
#include <tessera/fsdp/buffers/own_work.h>
#include <tessera/fsdp/group/parallel_parameter.h>

namespace tessera::internal {

namespace {

bool has_extension(const FreeParameter& parameter) { return parameter.extension != nullptr; }

bool is_split_already(const FreeParameter& parameter) { return parameter.parallel && !parameter.parallel->is_replicated(); }

GroupLayout layout_of(std::span<const FreeParameter> parameters, BufferLayout kind, int ranks) {
  std::vector<ParameterShape> shapes;
  std::vector<bool> extended;
  const auto is_ragged = [](const auto& each) { return !each.parallel || may_be_ragged(*each.parallel); };
  if (!std::all_of(parameters.begin(), parameters.end(), is_ragged)) kind = BufferLayout::kPerParameter;
  for (const auto& each : parameters) {
    const bool is_whole = each.placement && is_replicate(*each.placement); // as all of its group
    shapes.push_back({each.place.path, each.values().sizes().vec(), each.dtype, is_whole ? std::nullopt : each.placement});
    if (is_split_already(each)) shapes.back().largest = largest_part(*each.parallel);
    extended.push_back(has_extension(each));
  }
  if (std::none_of(parameters.begin(), parameters.end(), has_extension)) return plan_layout(kind, shapes, ranks);
  auto layout = plan_placed(shapes, ranks);
  leave_out(extended, shapes, layout);
  return layout;
}

GatherMessages messages_of(const BlockCodec& codec, std::span<const FreeParameter> parameters) {
  std::vector<GatheredParameter> gathered;
  for (const auto& each : parameters) gathered.push_back({each.dtype, each.is_quantized, !has_extension(each)});
  const bool any = std::any_of(gathered.begin(), gathered.end(), [](const auto& each) { return each.is_quantized; });
  return any ? GatherMessages(codec, std::move(gathered)) : GatherMessages();
}

ShardPlan shard_plan_of(std::span<const FreeParameter> parameters, const GroupLayout& layout, const MeshRoles& roles) {
  std::vector<ParameterDtypes> dtypes;
  for (const auto& each : parameters) dtypes.push_back({each.values().scalar_type(), each.dtype});
  const bool extends = std::any_of(parameters.begin(), parameters.end(), has_extension);
  return plan_shard(layout, dtypes, extends, static_cast<size_t>(roles.shard_rank()));
}

/// Whether each rank's part of a parameter with these strides is contiguous memory in it, and has them itself.
bool can_have_strided_shards(c10::IntArrayRef sizes, c10::IntArrayRef strides, const ParameterLayout& layout) {
  const auto* ragged = std::get_if<RaggedShard>(&layout.placement);
  if (ragged && ragged->dim > 0) return false; // a part has these dims as one
  if (layout.pieces.size() == 1) return true;
  const int64_t numel = c10::multiply_integers(sizes), row = numel / sizes[0];
  const bool rows_are_outermost = sizes[0] == 1 || strides[0] == row;
  return layout.split_dim == 0 && rows_are_outermost &&
         std::all_of(layout.pieces.runs().begin(), layout.pieces.runs().end(),
                     [&](const auto& run) { return run.range.begin % row == 0 && run.range.numel % row == 0; });
}

/// A parameter's share in its group, as a tensor hook. Autograd's part of a tensor goes with the last reference to it; the
/// backend meta would stay as long as the group's own weak reference. The hook also meets gradients of a graph from before.
struct KeepsGroupAlive {
  at::TensorBase operator()(const at::TensorBase& gradient) const {
    TORCH_CHECK(!gradient.defined() || dtensor_meta(gradient), "the gradient of ", group->full_name(index),
                " comes from a forward that ran before fully_shard: run the forward again");
    return {};
  }
  std::shared_ptr<ParameterGroup> group;
  size_t index;
};

/// Gives a parameter this share, in place of one that it has; none for an empty one.
void own(const at::Tensor& parameter, const std::function<at::TensorBase(const at::TensorBase&)>& share) {
  auto* autograd = torch::autograd::impl::materialize_autograd_meta(parameter);
  if (!autograd->cpp_hooks_list_) torch::autograd::impl::create_cpp_hook(parameter);
  for (auto& hook : *autograd->cpp_hooks_list_) {
    if (hook.target<KeepsGroupAlive>()) return void(hook = share);
  }
  autograd->cpp_hooks_list_->push_back(share);
}

} // namespace

std::vector<int64_t> own_strides(const at::Tensor& tensor) {
  const bool is_row_major = tensor.strides() == c10::IntArrayRef(c10::contiguous_strides(tensor.sizes()));
  if (is_row_major || tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) return {};
  return tensor.strides().vec();
}

std::string ParameterName::to_string() const {
  const auto group = group_.lock();
  return about_ + (group ? group->full_name(index_) : "a module that is gone");
}

int64_t shard_bytes_of(std::span<const FreeParameter> parameters, BufferLayout layout, const MeshRoles& roles) {
  return shard_plan_of(parameters, layout_of(parameters, layout, roles.shard_ranks()), roles).bytes;
}

ParameterGroup::ParameterGroup(std::shared_ptr<GroupOwner> made_for, const MeshRoles& roles, Stages stages,
                               const FullyShardOptions& options, std::shared_ptr<ModelResources> resources)
    : owner(std::move(made_for)),
      roles_(roles),
      stages_(std::move(stages)),
      options_(options),
      resources_(std::move(resources)),
      gather_(*this, stages_.gathers.size()) {}

ParameterGroup::~ParameterGroup() {
  for (const auto& parameter : parameters_) {
    if (parameter.meta) parameter.meta->group = nullptr;
  }
}

const std::string& ParameterGroup::label() const {
  if (label_.empty())
    label_ = part.number == 0 ? owner->label()
                              : fmt::format("{} {} {}", owner->label(), part.is_beside ? "part" : "bucket", part.number + 1);
  return label_;
}

void ParameterGroup::attach(size_t place, std::shared_ptr<ModelResources> resources) {
  number = place;
  label_.clear();
  if (resources == resources_) return;
  wait_for_readers(); // on the streams of before, whose memory was fetched into
  shard_.forget_fetch();
  resources_ = std::move(resources);
}

void ParameterGroup::shard(std::span<const FreeParameter> parameters, std::shared_ptr<OffloadMemory> memory) {
  const at::NoGradGuard no_grad;
  layout_ = layout_of(parameters, options_.layout, roles_.shard_ranks());
  shard_.plan(shard_plan_of(parameters, layout_, roles_), std::move(memory));
  if (stages_.has_after_forward()) // the unsharded parameters have a part for each of its ranks
    layout_.unsharded_bytes = at::round_up(layout_.unsharded_bytes, stages_.gathers.back().ranks() * kParameterAlignment);
  std::vector<at::Tensor> values; // which keep the storage when the parameters let go of it
  for (const auto& each : parameters) {
    values.push_back(each.values().detach());
    if (each.extension) gather_.extend(parameters_.size(), each.extension);
    add_parameter(each);
  }
  if (const auto& quantized = options_.communication.gather) gather_.send_messages(messages_of(quantized->codec, parameters));
  gather_.set_needed(differs_from_shard());
  const bool on_meta = parameters[0].tensor.is_meta();
  allocate_shard(on_meta ? c10::Device(c10::kMeta) : roles_.mesh().device());
  if (!on_meta) fill_shard(values);
  take_over_parameters();
  for (size_t i = 0; i < parameters.size(); ++i) own(parameters[i].tensor, KeepsGroupAlive{shared_from_this(), i});
  if (!on_meta) make_leaves();
}

/// On one rank too: a leaf with strides cannot lie in a shard without them.
bool ParameterGroup::differs_from_shard() const {
  const auto is_restrided = [](const ShardedParameter& each) { return each.strides.are_made_by_gathers(); };
  return roles_.shard_ranks() > 1 || shard_.plan().casts || !layout_.gathers_in_place || shard_.memory() ||
         std::any_of(parameters_.begin(), parameters_.end(), is_restrided);
}

void ParameterGroup::forget_after_forward(const Held& /*held*/) {
  if (gather_.forget_after_forward()) stages_.gathers.pop_back();
}

void ParameterGroup::start_fetch(const Held& /*held*/) {
  if (shard_.memory() && has_memory() && !is_open() && gather_.takes_shard()) shard_.start_fetch(*resources_);
}

void ParameterGroup::wait_for_readers() {
  gather_.join_users();
  shard_.wait_for_fetch(resources_->streams);
}

void ParameterGroup::release_parameter(size_t index) {
  auto& parameter = parameters_[index];
  const at::Tensor tensor(parameter.tensor.lock());
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->get_backend_meta() != parameter.meta.get()) return;
  become_dtensor(tensor, c10::make_intrusive<DTensorMeta>(parameter.local.clone(), parameter.spec), {});
  own(tensor, nullptr);
}

namespace {

ForeignDims order_of(const FreeParameter& free, BufferLayout layout) {
  const bool nests = layout == BufferLayout::kRagged || free.mark || is_packed(*free.parallel);
  return nests ? ForeignDims::kFirst : ForeignDims::kLast;
}

} // namespace

void ParameterGroup::add_parameter(const FreeParameter& free) {
  const auto& tensor = free.tensor;
  const size_t index = parameters_.size();
  const auto& layout = layout_.parameters[index];
  const auto sizes = tensor.sizes().vec(), strides = free.parallel ? std::vector<int64_t>() : own_strides(tensor);
  const auto dtype = free.values().scalar_type();
  parameters_.push_back(
      {.tensor = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
       .spec = free.parallel ? shard_further(*free.parallel, dtype, roles_, layout.placement, order_of(free, options_.layout))
                             : Spec::intern(roles_.mesh(), roles_.placements(layout.placement), sizes, dtype, strides),
       .gradient_name = c10::make_intrusive<ParameterName>("the gradient of ", weak_from_this(), index),
       .forward = {.dtype = free.dtype, .parallel = free.parallel, .mark = free.mark},
       .strides = {strides, !strides.empty() && can_have_strided_shards(sizes, strides, layout)},
       .origin = {free.place, MemoryRange::of(free.parallel ? free.value : tensor), free.placement}});
  if (free.parallel) check_part(index);
}

/// What the spec calls this rank's part is what the layout gives it.
void ParameterGroup::check_part(size_t index) const {
  const auto piece = layout_.parameters[index].pieces[static_cast<size_t>(roles_.shard_rank())];
  const auto& spec = *parameters_[index].spec;
  TORCH_INTERNAL_ASSERT(c10::multiply_integers(spec.local_sizes()) == piece.numel, full_name(index), ": ", piece.numel,
                        " elements in its group, but its spec is ", spec.to_string());
}

std::string ParameterGroup::full_name(size_t index) const {
  const auto& place = parameters_[index].origin.place;
  const auto path = owner->path(place.top);
  return path.empty() ? place.path : path + "." + place.path;
}

void ParameterGroup::materialize() {
  if (has_memory() || !shard_.bytes().is_meta()) return;
  const at::NoGradGuard no_grad;
  allocate_shard(roles_.mesh().device());
  take_over_parameters();
  make_leaves();
}

void ParameterGroup::allocate_shard(c10::Device device) {
  shard_.allocate(device);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    parameter.local = shard_.make_local(parameter.spec->local_sizes(), parameter.spec->dtype(), parameter.strides.shard());
    parameter.meta = c10::make_intrusive<ParameterMeta>(parameter.local, parameter.spec, this, i);
    parameter.meta->provenance.name = c10::make_intrusive<ParameterName>("the parameter ", weak_from_this(), i);
    parameter.meta->parallel = parameter.forward.parallel;
    if (!parameter.forward.parallel) parameter.meta->provenance.whole_dtype = parameter.forward.dtype;
  }
}

void ParameterGroup::take_over_parameters() {
  for (const auto& parameter : parameters_) {
    // One that its module gave up before it had memory is gone.
    if (const at::Tensor tensor(parameter.tensor.lock()); tensor.defined())
      become_dtensor(tensor, parameter.meta, c10::DispatchKeySet(kTouchKey));
  }
}

void ParameterGroup::fill_shard(const std::vector<at::Tensor>& values) {
  const auto rank = static_cast<size_t>(roles_.shard_rank());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto piece = layout_.parameters[i].pieces[rank];
    if (piece.numel == 0) continue;
    const auto part = owned_part(values[i], layout_.parameters[i], rank);
    parameters_[i].local.copy_(part.reshape(parameters_[i].local.sizes()));
  }
}

void ParameterGroup::make_leaves() {
  gather_.make_storage(shard_.bytes());
  const auto& policy = options_.mixed_precision;
  const bool may_meet_dtensors = !(roles_.mesh().root() == roles_.mesh());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    const at::Tensor tensor(parameter.tensor.lock());
    // A leaf that aliases the shard is always valid: nothing needs to see its reads, unless it is to cast what is beside it, or
    // activations may be beside it that are DTensors of other dims of the mesh.
    const bool is_seen = needs_gather() || may_meet_dtensors || (policy.param_dtype && policy.cast_forward_inputs);
    const auto keys = is_seen ? c10::DispatchKeySet(kTouchKey) : c10::DispatchKeySet();
    parameter.leaf = tensor_over(c10::Storage(gather_.storage()), layout_.parameters[i].unsharded_offset,
                                 parameter.unsharded_sizes(), parameter.forward.dtype, keys, parameter.strides.whole);
    parameter.other_leaves.frozen = at::Tensor();
    if (!tensor.defined()) continue;
    share_version(tensor, parameter.leaf);
    parameter.leaf.set_requires_grad(tensor.requires_grad());
  }
}

bool is_saved_copy(const ShardedParameter& parameter, const at::Tensor& tensor) {
  return parameter.accumulator && torch::autograd::impl::try_get_grad_accumulator(tensor) == parameter.accumulator;
}

void ParameterGroup::check_parameters_alive() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    TORCH_CHECK(!parameters_[i].tensor.expired(), "the sharded parameter ", full_name(i), " of ", label(),
                " is gone: the module's parameters changed after fully_shard. Call tessera::reshard_parameters after the change, "
                "replace parameters before fully_shard, or copy new values with parameter.copy_(full_tensor)");
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

/// Of what was written already: the next read gathers it again.
void ParameterGroup::check_is_gathered_as_it_is(const UnshardedRange& written) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool is_quantized = needs_gather() && gather_.messages().contains(i);
    if (!(is_quantized || gather_.extended().contains(i)) || !UnshardedRange::of(parameters_[i].leaf).overlaps(written)) continue;
    gather_.set_version(std::nullopt);
    TORCH_CHECK(false, "the unsharded parameter ", full_name(i), " was written, and it ",
                is_quantized ? "is gathered in fewer bits" : "has a gather extension",
                ": its shards are not of what is gathered. Write the parameter itself, as a whole "
                "(parameter.copy_(full_tensor))");
  }
}

void ParameterGroup::write_back(const Held& /*held*/, const UnshardedRange& written) {
  if (needs_gather() && !is_unsharded()) return;
  check_is_gathered_as_it_is(written);
  const at::NoGradGuard no_grad;
  const KeptResults::Scope keeps_nothing;
  const auto rank = static_cast<size_t>(roles_.shard_rank());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = layout_.parameters[i];
    const auto piece = parameter.pieces[rank];
    if (!UnshardedRange::of(parameters_[i].leaf).overlaps(written)) continue;
    parameters_[i].local.unsafeGetTensorImpl()->bump_version(); // on every rank, with a part or without
    if (!needs_gather() || piece.numel == 0) continue;
    const auto dtype = parameters_[i].leaf.scalar_type();
    auto& local = parameters_[i].local;
    const auto whole = owned_part(gather_.whole_parameter(i), parameter, rank).reshape(local.sizes()).to(local.device());
    // What a cast only rounded keeps its value.
    local.copy_(dtype == local.scalar_type() ? whole
                                             : at::where(local.to(dtype).eq(whole), local, whole.to(local.scalar_type())));
  }
  gather_.set_version(shard_version());
}

} // namespace tessera::internal
