#include <tessera/dtensor/execute/execute.h>

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <tessera/dtensor/execute/borrowed_locals.h>
#include <tessera/dtensor/execute/call_provenance.h>
#include <tessera/dtensor/execute/leaf_gradient.h>
#include <tessera/dtensor/plan/plan.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

namespace {

using torch::jit::Stack;

/// Runs one planned call.
class Execution {
 public:
  Execution(const c10::OperatorHandle& op, const OpInfo& info, Plan& plan, Stack* stack)
      : op_(op), info_(info), plan_(plan), stack_(stack), begin_(stack->size() - info.arguments.size()) {}

  void run() {
    unwrap();
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                             c10::DispatchKeySet(kDTensorKey));
    if (!plan_.on_mesh) {
      skip();
    } else if (const auto kernel = std::get_if<rules::OnLocals>(info_.rule)->kernel) {
      kernel({op_, stack_, plan_.outputs, plan_.input_specs, copies_view_});
    } else {
      op_.callBoxed(stack_);
    }
    if (C10_UNLIKELY(!borrowed_.empty()) && plan_.on_mesh) borrowed_.give_back(info_.name);
    wrap();
  }

 private:
  void unwrap() {
    const bool grad_mode = at::GradMode::is_enabled();
    size_t input = 0;
    for (size_t i = 0; i < info_.arguments.size(); ++i) {
      auto& value = (*stack_)[begin_ + i];
      const auto& argument = info_.arguments[i];
      if (argument.kind == ArgKind::kTensor) {
        if (grad_mode && value.isTensor()) place_leaf_gradient(value.toTensor());
        auto local = local_of(value, input++, argument.written);
        if (!local.defined()) continue;
        if (argument.written) {
          written_.emplace_back(static_cast<int>(i), std::move(value));
        } else if (info_.views && !viewed_.defined()) {
          viewed_ = value.toTensor();
        }
        value = std::move(local);
      } else if (argument.kind == ArgKind::kTensorList && !value.isNone()) {
        if (grad_mode) place_leaf_gradients(value);
        value = locals_of(value, input, argument.written);
      }
    }
    provenance_.pass_to_written();
  }

  static void place_leaf_gradients(const c10::IValue& list) {
    for (const auto& element : list.toListRef()) {
      if (element.isTensor()) place_leaf_gradient(element.toTensor());
    }
  }

  c10::IValue locals_of(c10::IValue& value, size_t& input, bool written) {
    const auto elements = value.toListRef();
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& element : elements) {
        auto local = local_of(element, input++, written);
        list.push_back(local.defined() ? std::optional(std::move(local)) : std::nullopt);
      }
      return list;
    }
    // The list is the call's own where nothing else holds it: its elements are replaced, which saves a copy of the list.
    const bool own = value.use_count() == 1;
    auto list = own ? std::move(value).toTensorList() : c10::List<at::Tensor>();
    if (!own) list.resize(elements.size());
    for (size_t i = 0; i < elements.size(); ++i) {
      auto local = local_of(elements[i], input++, written);
      // Autograd's kernels count the writes of single tensors, not those of lists.
      if (written && local.defined()) elements[i].toTensor().unsafeGetTensorImpl()->bump_version();
      list.set(i, std::move(local));
    }
    return list;
  }

  at::Tensor local_of(const c10::IValue& value, size_t input, bool written) {
    auto local = local_at_target(value, input, written);
    const auto& stretch = plan_.inputs[input].stretch;
    if (C10_LIKELY(!stretch)) return local;
    return stretched(local, *stretch);
  }

  at::Tensor local_at_target(const c10::IValue& value, size_t input, bool written) {
    if (!value.isTensor()) return {};
    const auto& tensor = value.toTensor();
    auto* meta = dtensor_meta(tensor);
    const auto& plan = plan_.inputs[input];
    const MoveRequest request{.signs_checked = plan.joins_norm};
    if (!meta) return plan.target ? redistribute_local(tensor, *plan.source, *plan.target, info_.name, request) : tensor;
    provenance_.note(tensor, *meta);
    if (C10_UNLIKELY(meta->copied_at_version.has_value())) check_copy(tensor, *meta, written, info_.name);
    if (C10_UNLIKELY(written)) return local_to_write(*meta, plan);
    if (C10_LIKELY(!plan.moves)) return meta->local;
    auto moved = redistribute_local(tensor, *meta, plan.target, info_.name, request);
    // A slice has gaps. Kernels take those of any argument but what their forward made (statistics, indices).
    const bool gaps = info_.is_backward && !moved.is_non_overlapping_and_dense();
    return gaps ? moved.clone() : moved;
  }

  at::Tensor local_to_write(DTensorMeta& meta, const Plan::Input& plan) {
    if (meta.reduced) forget_reduced_value(meta);
    provenance_.note_written(meta);
    const bool moves = plan.target && meta.spec != plan.target; // not again for one that a list holds twice
    const bool borrows = moves && plan.returns && (!meta.spec->has_partial() || shares_memory(meta));
    if (C10_UNLIKELY(moves && !borrows)) move_written(meta, plan.target);
    // Kernels run below the level that counts versions, and autograd may have saved what `to_local` returned.
    if (!meta.local.is_inference()) meta.local.unsafeGetTensorImpl()->bump_version();
    return C10_UNLIKELY(borrows) ? borrowed_.take(meta, plan.target, info_.name) : meta.local;
  }

  /// A temporary of a derivative formula takes the placement that it is written in, and so does a sum that is reduced to be
  /// written: as a sum it would be reduced again at its next read.
  void move_written(DTensorMeta& meta, const SpecPtr& target) const {
    TORCH_CHECK(
        !shares_memory(meta), info_.name,
        ": a tensor that is written in backward would have to change its placement, but others share its memory; its spec is ",
        meta.spec->to_string());
    auto local = redistribute_local(meta.local, *meta.spec, *target, info_.name);
    meta.local = local.is_alias_of(meta.local) ? local.clone() : std::move(local);
    meta.spec = target;
  }

  void wrap() {
    const size_t count = info_.returns.size(), first = stack_->size() - count;
    size_t output = 0;
    for (size_t r = 0; r < count; ++r) {
      auto& value = (*stack_)[first + r];
      const auto& result = info_.returns[r];
      if (result.written_argument >= 0) {
        for (auto& [argument, original] : written_) {
          if (argument == result.written_argument) value = original;
        }
        if (C10_UNLIKELY(plan_.wrapping.shapes == rules::Wrapping::kOfLocals && value.isTensor())) check_size(value.toTensor());
        ++output;
      } else if (value.isTensor()) {
        auto wrapped = wrap_one(value.toTensor(), output++);
        value = std::move(wrapped);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        list.reserve(value.toListRef().size());
        for (const auto& element : value.toListRef()) list.push_back(wrap_one(element.toTensor(), output++));
        value = std::move(list);
      }
    }
  }

  /// A kernel may resize what it writes; a DTensor's shape does not follow.
  void check_size(const at::Tensor& tensor) const {
    const auto& meta = *dtensor_meta(tensor);
    TORCH_CHECK(meta.local.sizes() == c10::IntArrayRef(meta.spec->local_sizes()), info_.name, ": the result has shape ",
                meta.local.sizes(), ", but the written DTensor is ", meta.spec->to_string(), ", and is not resized");
  }

  /// Whole dims have the local size.
  std::vector<int64_t> completed(std::vector<int64_t> sizes, const at::Tensor& local) const {
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] != rules::kUnknownSize) continue;
      TORCH_CHECK(plan_.on_mesh, info_.name,
                  ": this rank is outside the mesh, and cannot tell the shape of the result; it is on ", mesh().to_string());
      sizes[d] = local.size(static_cast<int64_t>(d));
    }
    return sizes;
  }

  /// Whether `local` is such a result as the one before.
  static bool is_as_before(const rules::OutputPlan& plan, const at::Tensor& local) {
    if (!plan.spec || plan.spec->dtype() != local.scalar_type()) return false;
    return C10_LIKELY(plan.strides.has_value()) || local.sizes() == c10::IntArrayRef(plan.spec->local_sizes());
  }

  static std::vector<int64_t> strides_of(const rules::OutputPlan& plan, const std::vector<int64_t>& sizes) {
    if (plan.strides) return *plan.strides;
    if (plan.format == at::MemoryFormat::ChannelsLast) return c10::get_channels_last_strides_2d(sizes);
    if (plan.format == at::MemoryFormat::ChannelsLast3d) return c10::get_channels_last_strides_3d(sizes);
    return contiguous_strides(sizes);
  }

  const SpecPtr& spec_of(rules::OutputPlan& plan, const at::Tensor& local) const {
    if (C10_LIKELY(is_as_before(plan, local))) return plan.spec;
    auto sizes = completed(plan.sizes, local);
    auto strides = strides_of(plan, sizes);
    plan.spec = Spec::intern(mesh(), plan.placements, std::move(sizes), local.scalar_type(), std::move(strides));
    return plan.spec;
  }

  /// Where nothing tells the strides, a kernel chooses them by this rank's part, and all ranks must have the same ones.
  at::Tensor laid_out(const rules::OutputPlan& plan, const at::Tensor& local) const {
    if (plan.strides || viewed_.defined()) return local;
    const bool is_merged = local.dim() != static_cast<int64_t>(plan.sizes.size());
    return local.contiguous(is_merged ? at::MemoryFormat::Contiguous : plan.format);
  }

  at::Tensor wrap_one(const at::Tensor& local, size_t index) {
    if (!local.defined()) return local;
    if (C10_UNLIKELY(plan_.wrapping.plain.contains(index))) return local;
    if (C10_UNLIKELY(plan_.wrapping.shapes == rules::Wrapping::kOfLocals)) {
      return noted(make_dtensor(local, Spec::intern(mesh(), Placements(mesh().ndim()), local.sizes().vec(), local.scalar_type(),
                                                    local.strides().vec())));
    }
    TORCH_INTERNAL_ASSERT(index < plan_.outputs.size(), info_.name);
    auto& plan = plan_.outputs[index];
    const auto& spec = spec_of(plan, local);
    // A view of a normal tensor is one as well, in InferenceMode too: it shares the version counter.
    const bool normal_view = viewed_.defined() && !viewed_.is_inference() && c10::InferenceMode::is_enabled();
    std::optional<c10::InferenceMode> normal_mode;
    if (C10_UNLIKELY(normal_view)) normal_mode.emplace(false);
    auto result = make_dtensor(laid_out(plan, local), spec);
    if (viewed_.defined()) {
      join_viewed(result);
      if (C10_UNLIKELY(local.is_inference())) CallProvenance::share_writes(*dtensor_meta(result), viewed_);
      if (C10_UNLIKELY(spec->has_partial())) keep_no_reduced_values(result);
    }
    return noted(std::move(result));
  }

  /// A view counts versions with what it is a view of. One that had to move is a copy, and so are the views of one.
  void join_viewed(const at::Tensor& result) const {
    const auto* source = dtensor_meta(viewed_);
    const bool of_copy = source && source->copied_at_version.has_value();
    if (C10_LIKELY(!plan_.moves_viewed && !copies_view_ && !of_copy)) {
      const auto& local = dtensor_meta(result)->local;
      if (source && !source->local.is_inference() && !local.is_inference())
        local.unsafeGetTensorImpl()->set_version_counter(source->local.unsafeGetTensorImpl()->version_counter());
      return;
    }
    if (viewed_.is_inference()) { // it counts no versions
      dtensor_meta(result)->copied_at_version = 0;
      return;
    }
    result.unsafeGetTensorImpl()->set_version_counter(viewed_.unsafeGetTensorImpl()->version_counter());
    dtensor_meta(result)->copied_at_version = of_copy ? *source->copied_at_version : static_cast<uint32_t>(viewed_._version());
  }

  /// A write through one of a tensor and its views does not show in the metas of the others.
  void keep_no_reduced_values(const at::Tensor& result) const {
    for (auto* meta : {dtensor_meta(viewed_), dtensor_meta(result)}) {
      if (meta && meta->spec->numel() == 1) forget_reduced_value(*meta, /*for_good=*/true);
    }
  }

  at::Tensor noted(at::Tensor result) const {
    provenance_.pass_to(*dtensor_meta(result), viewed_);
    return result;
  }

  const DeviceMesh& mesh() const {
    for (const auto& spec : plan_.input_specs) {
      if (spec) return spec->mesh();
    }
    TORCH_INTERNAL_ASSERT(false, info_.name, " has no DTensor argument");
  }

  /// A rank outside the mesh computes nothing.
  void skip() {
    stack_->resize(begin_);
    size_t output = 0;
    const auto empty = [&](size_t index) {
      const auto dtype =
          index < plan_.outputs.size() ? plan_.outputs[index].dtype : at::kLong; // of positions, which are not planned
      return at::empty({0}, at::TensorOptions().dtype(dtype));
    };
    for (size_t r = 0; r < info_.returns.size(); ++r) {
      const auto kind = op_.schema().returns()[r].type()->kind();
      if (kind == c10::TypeKind::ListType) {
        c10::List<at::Tensor> list;
        while (output < plan_.outputs.size()) list.push_back(empty(output++));
        stack_->emplace_back(std::move(list));
      } else if (kind == c10::TypeKind::TensorType) {
        stack_->emplace_back(empty(output++));
      } else {
        stack_->emplace_back(int64_t{0}); // a length beside tensors
      }
    }
  }

  const c10::OperatorHandle& op_;
  const OpInfo& info_;
  Plan& plan_;
  Stack* stack_;
  const size_t begin_;
  absl::InlinedVector<std::pair<int, c10::IValue>, 2> written_;
  at::Tensor viewed_;
  bool copies_view_ = false; ///< the kernel could not view the part of `viewed_`
  BorrowedLocals borrowed_;
  CallProvenance provenance_{info_.reads_no_value};
};

} // namespace

void execute(const c10::OperatorHandle& op, const OpInfo& info, Plan& plan, Stack* stack) {
  Execution(op, info, plan, stack).run();
}

} // namespace tessera::internal::dispatch
