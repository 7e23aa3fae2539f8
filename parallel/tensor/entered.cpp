#include <tessera/parallel/tensor/entered.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <utility>

#include <tessera/dtensor/redistribute/move.h>
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
  at::Tensor result; ///< without history

  bool serves(const at::Tensor& x, const SpecPtr& wanted, bool needs) const {
    return source._unsafe_get_target() == x.unsafeGetTensorImpl() && version == x._version() && target == wanted &&
           has_graph == needs;
  }
};
thread_local std::optional<Entered> last;

/// Another handle of `result` whose gradient goes into `node`.
at::Tensor again(const at::Tensor& result, const std::shared_ptr<torch::autograd::Node>& node) {
  auto alias = alias_dtensor(result);
  if (node) torch::autograd::impl::set_gradient_edge(alias, {node, 0});
  return alias;
}

} // namespace

Placement at_dim(Placement placement, int64_t ndim) {
  if (auto* shard = std::get_if<Shard>(&placement)) {
    if (shard->dim < 0) shard->dim += ndim;
  } else if (auto* strided = std::get_if<StridedShard>(&placement)) {
    if (strided->dim < 0) strided->dim += ndim;
  }
  return placement;
}

void forget_entered() { last.reset(); }

at::Tensor entered(const at::Tensor& x, const Placement& wanted, const std::string& label) {
  const auto& spec = *dtensor_meta(x)->spec;
  const auto target = spec.with({wanted});
  const bool graph = needs_graph(x);
  if (!graph && target.get() == &spec) return x;
  const bool counts = !x.is_inference(); // others have no version
  if (last && counts && last->serves(x, target, graph)) {
    const auto node = last->node.lock();
    if (!graph || node) return again(last->result, node);
  }
  last.reset(); // before its memory is needed
  auto result = differentiable_move(x, spec.mesh(), {wanted}, label.c_str());
  if (counts)
    last.emplace(Entered{c10::weak_intrusive_ptr<c10::TensorImpl>(x.getIntrusivePtr()), static_cast<uint32_t>(x._version()),
                         target, graph ? result.grad_fn() : nullptr, graph, alias_dtensor(result)});
  return result;
}

at::Tensor left(const at::Tensor& result, const Placement& wanted, const std::string& label) {
  const auto& spec = *dtensor_meta(result)->spec;
  return spec.placements()[0] == wanted ? result : differentiable_move(result, spec.mesh(), {wanted}, label.c_str());
}

} // namespace tessera::internal::parallel
