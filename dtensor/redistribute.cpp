#include <ATen/ops/_to_copy.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/move.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/redistribute/transition.h>

namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor cast(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  return dtype && *dtype != tensor.scalar_type() ? at::_to_copy(tensor, tensor.options().dtype(*dtype)) : tensor;
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
void save(AutogradContext* context, const at::Tensor& tensor, std::optional<at::ScalarType> backward_dtype) {
  save_spec(context, meta_of(tensor, "redistribute").spec);
  context->saved_data["dtype"] = static_cast<int64_t>(backward_dtype.value_or(tensor.scalar_type()));
}

at::Tensor move_back(AutogradContext* context, const at::Tensor& gradient) {
  const auto spec = saved_spec(context);
  const auto dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
  const auto moved =
      move_to(cast(gradient, dtype), spec->mesh(), replicate_partial(spec->placements()), "redistribute (backward)");
  return cast(moved, spec->dtype());
}

struct Redistribute : torch::autograd::Function<Redistribute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const DeviceMesh& mesh,
                            const Placements& placements, const RedistributeOptions& options) {
    save(context, tensor, options.backward_dtype);
    return move_to(cast(tensor, options.forward_dtype), mesh, placements, "redistribute");
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {move_back(context, gradients[0]), {}, {}, {}};
  }
};

/// Gives what a pending redistribution made its place in the graph.
struct FinishRedistribute : torch::autograd::Function<FinishRedistribute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& source, const at::Tensor& result) {
    save(context, source, std::nullopt);
    return alias_dtensor(result);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {move_back(context, gradients[0]), {}};
  }
};

} // namespace

DTensor DTensor::redistribute(const DeviceMesh& mesh, const Placements& placements, const RedistributeOptions& options) const {
  const at::Tensor& source = *this; // apply looks for arguments of type at::Tensor
  if (needs_graph(source)) return DTensor(Redistribute::apply(source, mesh, placements, options));
  return DTensor(move_to(cast(source, options.forward_dtype), mesh, placements, "redistribute"));
}

DTensor DTensor::redistribute(const Placements& placements, const RedistributeOptions& options) const {
  const bool casts = options.forward_dtype && *options.forward_dtype != scalar_type();
  if (!casts && spec().with(placements).get() == &spec()) return *this;
  return redistribute(mesh(), placements, options);
}

struct PendingDTensor::State {
  at::Tensor source;
  SpecPtr target;
  redistribute::Deferred deferred;
  at::Tensor unfinished;
  std::optional<DTensor> result;
};

PendingDTensor DTensor::redistribute_async(const Placements& placements) const {
  auto state = std::make_shared<PendingDTensor::State>();
  state->source = *this;
  state->target = spec().with(placements);
  if (state->target.get() == &spec()) {
    state->result.emplace(*this);
  } else {
    state->unfinished =
        redistribute_local(meta_of(*this, "redistribute_async").local, spec(), *state->target, "redistribute", &state->deferred);
  }
  return PendingDTensor(std::move(state));
}

bool PendingDTensor::is_completed() const {
  TORCH_CHECK(state_, "is_completed: this PendingDTensor was moved from");
  return state_->result.has_value() || state_->deferred.work.is_completed();
}

DTensor PendingDTensor::wait() {
  TORCH_CHECK(state_, "wait: this PendingDTensor was moved from");
  auto& state = *state_;
  if (state.result) return *state.result;
  state.deferred.work.wait();
  at::Tensor result;
  {
    at::NoGradGuard no_grad;
    auto local = std::move(state.unfinished);
    for (const auto& step : state.deferred.then) local = step(local);
    result = wrap_moved(std::move(local), dtensor_meta(state.source)->local, *state.target);
  }
  if (needs_graph(state.source)) result = FinishRedistribute::apply(state.source, result);
  state.result.emplace(std::move(result));
  return *state.result;
}

} // namespace tessera
