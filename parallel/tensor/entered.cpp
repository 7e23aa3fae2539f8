#include <tessera/parallel/tensor/entered.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <utility>

#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/redistribute/started_move.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::parallel {

namespace {

/// What was made of the last activation that entered a layer.
struct Entered {
  c10::weak_intrusive_ptr<c10::TensorImpl> source; ///< the address alone might be another tensor's by now
  uint32_t version;
  SpecPtr target;
  std::weak_ptr<torch::autograd::Node> node; ///< a strong reference would keep the graph
  bool has_graph;
  at::Tensor result;                ///< without history
  std::shared_ptr<int64_t> readers; ///< how many got it

  bool serves(const at::Tensor& x, const SpecPtr& wanted) const {
    return source._unsafe_get_target() == x.unsafeGetTensorImpl() && version == x._version() && target == wanted &&
           has_graph == needs_graph(x) && (!has_graph || !node.expired());
  }
};

/// What a thread knows of the layers that it computes.
struct Layers {
  std::optional<Entered> last; ///< the activation that entered last
  bool is_inside = false;      ///< of one whose activation has entered
};
constinit PerThread<Layers> layers;

SpecPtr target_of(const at::Tensor& x, const Placement& wanted) { return dtensor_meta(x)->spec->with({wanted}); }

bool last_serves(const at::Tensor& x, const SpecPtr& target) {
  const auto& last = layers->last;
  return last && !x.is_inference() && last->serves(x, target); // tensors of InferenceMode have no version
}

/// Another handle of `result` whose gradient goes into `node`.
at::Tensor again(const at::Tensor& result, const std::shared_ptr<torch::autograd::Node>& node) {
  auto alias = alias_dtensor(result);
  if (node) torch::autograd::impl::set_gradient_edge(alias, {node, 0});
  return alias;
}

/// Keeps what was made of `x` for the readers after this one.
InLayer remember(const at::Tensor& x, SpecPtr target, at::Tensor result) {
  auto readers = std::make_shared<int64_t>(1);
  const bool graph = needs_graph(x);
  if (!x.is_inference())
    layers->last.emplace(Entered{c10::weak_intrusive_ptr<c10::TensorImpl>(x.getIntrusivePtr()),
                                 static_cast<uint32_t>(x._version()), std::move(target), graph ? result.grad_fn() : nullptr,
                                 graph, alias_dtensor(result), readers});
  return {std::move(result), std::move(readers)};
}

/// The gradient of a sum is that of its terms, wherever it lies.
struct LeaveWithGradient : torch::autograd::Function<LeaveWithGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& result, const Placement& wanted,
                            const char* label) {
    auto moved = move(result, {wanted}, label);
    save_spec(context, dtensor_meta(moved)->spec);
    return moved;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradient_as_dtensor(gradients[0], *saved_spec(context), "a layer in codes (backward)"), {}, {}};
  }
};

} // namespace

InsideLayer::InsideLayer() : inside_(layers->is_inside, true) {}
bool InsideLayer::is_here() { return layers->is_inside; }

Placement at_dim(Placement placement, int64_t ndim) {
  if (auto* shard = std::get_if<Shard>(&placement)) {
    if (shard->dim < 0) shard->dim += ndim;
  } else if (auto* strided = std::get_if<StridedShard>(&placement)) {
    if (strided->dim < 0) strided->dim += ndim;
  }
  return placement;
}

void forget_entered() { layers->last.reset(); }

bool has_entered(const at::Tensor& x, const Placement& wanted) { return last_serves(x, target_of(x, wanted)); }

InLayer entered_as(const at::Tensor& x, const at::Tensor& moved) {
  forget_entered();
  return remember(x, target_of(x, dtensor_meta(moved)->spec->placements()[0]), moved_in_graph(x, moved));
}

at::Tensor entered(const at::Tensor& x, const Placement& wanted, const std::string& label) {
  const auto& spec = *dtensor_meta(x)->spec;
  const auto target = spec.with({wanted});
  if (!needs_graph(x) && target.get() == &spec) return x;
  if (last_serves(x, target)) {
    const auto& last = *layers->last;
    ++*last.readers;
    return again(last.result, last.node.lock());
  }
  forget_entered(); // before its memory is needed
  return remember(x, target, differentiable_move(x, spec.mesh(), {wanted}, label.c_str())).x;
}

at::Tensor left(const at::Tensor& result, const Placement& wanted, const std::string& label) {
  const auto& spec = *dtensor_meta(result)->spec;
  return spec.placements()[0] == wanted ? result : differentiable_move(result, spec.mesh(), {wanted}, label.c_str());
}

at::Tensor left_with_gradient(const at::Tensor& result, const Placement& wanted, const std::string& label) {
  const auto& placement = dtensor_meta(result)->spec->placements()[0];
  const bool has_moved_gradient = needs_graph(result) && is_partial(placement) && placement != wanted;
  return has_moved_gradient ? LeaveWithGradient::apply(result, wanted, label.c_str()) : left(result, wanted, label);
}

} // namespace tessera::internal::parallel
