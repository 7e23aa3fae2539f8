#include <ATen/ops/_to_copy.h>

#include <tessera/base/current_stream.h>
#include <tessera/collectives/calls/stream_mark.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/redistribute/started_move.h>
#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor cast(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  if (!dtype || *dtype == tensor.scalar_type()) return tensor;
  // `to` may return its argument: without grad mode, of a sharded parameter, it is taken for a read in forward.
  return needs_graph(tensor) ? tensor.to(*dtype) : at::_to_copy(tensor, tensor.options().dtype(dtype));
}

/// `tensor` under `placements` of `mesh`, which may be another one, outside autograd.
at::Tensor move_to(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements, const char* label) {
  const auto& spec = *meta_of(tensor, label).spec;
  if (spec.mesh() == mesh) return move(tensor, placements, label);
  const auto target = Spec::intern(mesh, placements, spec.sizes(), spec.dtype());
  const auto [local, from] = only_shards(tensor, label);
  const auto& here = meta_of(tensor, label).local;
  return wrap_moved(move_between_meshes(local, *from, *target, label), here, *target);
}

/// What the backward needs of the forward: the source's layout, and the dtype in which gradients move.
void save(AutogradContext* context, const SpecPtr& spec, std::optional<at::ScalarType> backward_dtype) {
  save_spec(context, spec);
  context->saved_data["dtype"] = static_cast<int64_t>(backward_dtype.value_or(spec->dtype()));
}

/// The gradient where the source lies. A redistribution is the identity on values, so its derivative is one as well, and is
/// differentiable in turn.
at::Tensor move_back(AutogradContext* context, const at::Tensor& gradient) {
  const auto spec = saved_spec(context);
  const auto dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
  constexpr auto* kLabel = "redistribute (backward)";
  const auto given = gradient_as_dtensor(gradient, *spec, kLabel);
  const auto moved = differentiable_move(cast(given, dtype), spec->mesh(), replicate_partial(spec->placements()), kLabel);
  return cast(moved, spec->dtype());
}

struct Redistribute : torch::autograd::Function<Redistribute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const DeviceMesh& mesh,
                            const Placements& placements, const RedistributeOptions& options, const char* label) {
    save(context, meta_of(tensor, label).spec, options.backward_dtype);
    return move_to(cast(tensor, options.forward_dtype), mesh, placements, label);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {move_back(context, gradients[0]), {}, {}, {}, {}};
  }
};

/// Gives what a pending redistribution made its place in the graph.
struct FinishRedistribute : torch::autograd::Function<FinishRedistribute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& source, const at::Tensor& result) {
    save(context, dtensor_meta(source)->spec, std::nullopt);
    return alias_dtensor(result);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {move_back(context, gradients[0]), {}};
  }
};

} // namespace

at::Tensor differentiable_move(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements, const char* label,
                               const RedistributeOptions& options) {
  if (needs_graph(tensor)) return Redistribute::apply(in_graph(tensor), mesh, placements, options, label);
  return move_to(cast(tensor, options.forward_dtype), mesh, placements, label);
}

StartedMove::StartedMove(const at::Tensor& tensor, const Placements& placements, std::string_view label)
    : source_(dtensor_meta(tensor)->local), target_(dtensor_meta(tensor)->spec->with(placements)) {
  unfinished_ = redistribute_local(source_, *dtensor_meta(tensor)->spec, *target_, label, {&deferred_});
}

at::Tensor StartedMove::finish() {
  const at::NoGradGuard no_grad;
  deferred_.work.wait();
  auto local = std::move(unfinished_);
  for (const auto& step : deferred_.then) local = step(local);
  return wrap_moved(std::move(local), std::exchange(source_, {}), *target_);
}

at::Tensor moved_in_graph(const at::Tensor& source, const at::Tensor& result) {
  return needs_graph(source) ? FinishRedistribute::apply(in_graph(source), result) : result;
}

} // namespace tessera::internal

namespace tessera {

DTensor DTensor::redistribute(const DeviceMesh& mesh, const Placements& placements, const RedistributeOptions& options) const {
  return DTensor(internal::differentiable_move(*this, mesh, placements, "redistribute", options));
}

DTensor DTensor::redistribute(const Placements& placements, const RedistributeOptions& options) const {
  const bool casts = options.forward_dtype && *options.forward_dtype != scalar_type();
  if (!casts && spec().with(placements).get() == &spec()) return *this;
  return redistribute(mesh(), placements, options);
}

struct PendingDTensor::State {
  at::Tensor source; ///< another handle, with the place in the graph that the source had: a write may give that a new one
  SpecPtr target;
  internal::redistribute::Deferred deferred;
  at::Tensor unfinished;
  std::optional<DTensor> result;
  Work computed; ///< the result, on the stream of the thread that finished it; another one waits for it

  void finish() {
    at::Tensor moved;
    {
      at::NoGradGuard no_grad;
      auto local = std::move(unfinished);
      for (const auto& step : deferred.then) local = step(local);
      moved = internal::wrap_moved(std::move(local), internal::dtensor_meta(source)->local, *target);
    }
    result.emplace(internal::moved_in_graph(source, moved));
    if (const auto stream = internal::current_stream_if_any(result->device())) computed = internal::mark(*stream);
  }
};

PendingDTensor DTensor::redistribute_async(const Placements& placements) const {
  const auto& meta = internal::meta_of(*this, "redistribute_async");
  auto state = std::make_shared<PendingDTensor::State>();
  state->source = internal::alias_dtensor(*this);
  if (internal::needs_graph(*this)) {
    torch::autograd::impl::set_gradient_edge(state->source, torch::autograd::impl::gradient_edge(internal::in_graph(*this)));
  }
  state->target = spec().with(placements);
  state->unfinished = internal::redistribute_local(meta.local, spec(), *state->target, "redistribute", {&state->deferred});
  if (!state->deferred.started) state->finish();
  return PendingDTensor(std::move(state));
}

bool PendingDTensor::is_completed() const {
  TORCH_CHECK(state_, "is_completed: this PendingDTensor was moved from");
  return state_->result ? state_->computed.is_completed() : state_->deferred.work.is_completed();
}

DTensor PendingDTensor::wait() {
  TORCH_CHECK(state_, "wait: this PendingDTensor was moved from");
  auto& state = *state_;
  if (!state.result) {
    state.deferred.work.wait();
    state.finish();
  }
  state.computed.wait();
  return *state.result;
}

} // namespace tessera
