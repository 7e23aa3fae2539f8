#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>

#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/rules/registry.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::rules {

namespace {

SpecPtr replicated(const Spec& spec) { return spec.with(Placements(spec.placements().size())); }

/// item(): the one element, reduced or gathered where it has to be.
void local_scalar(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  const auto tensor = stack->back().toTensor();
  auto& meta = meta_of(tensor, "item");
  TORCH_CHECK(meta.spec->numel() == 1, op.operator_name(), ": a tensor with ", meta.spec->numel(),
              " elements cannot be converted to a scalar; ", meta.spec->to_string());
  TORCH_CHECK(meta.spec->on_mesh(), op.operator_name(), ": this rank is outside the mesh of ", meta.spec->to_string());
  const auto local = redistribute_local(tensor, meta, replicated(*meta.spec), "item");
  stack->back() = local.item();
}

bool equal_everywhere(const at::Tensor& a, const at::Tensor& b) {
  const auto* left = dtensor_meta(a);
  const auto* right = dtensor_meta(b);
  TORCH_CHECK(left && right, "aten::equal: a DTensor cannot be compared with a plain tensor; use full_tensor() on it");
  check_copy(a, *left, false, "aten::equal");
  check_copy(b, *right, false, "aten::equal");
  TORCH_CHECK(left->spec->mesh() == right->spec->mesh(), "aten::equal: the tensors lie on different meshes");
  if (left->spec->sizes() != right->spec->sizes()) return false;
  const auto& spec = *left->spec;
  const auto common = spec.has_partial() ? replicated(spec)->placements() : spec.placements();
  const auto locals = [&](const DTensorMeta& meta) {
    return redistribute_local(meta.local, *meta.spec, *meta.spec->with(common), "equal");
  };
  if (!spec.on_mesh()) return true;
  const auto mine =
      at::full({}, at::equal(locals(*left), locals(*right)), at::TensorOptions().dtype(at::kByte).device(a.device()));
  Placements all;
  for (const auto& placement : common) all.push_back(is_sharded(placement) ? Placement(Partial{Partial::Op::kMin}) : Replicate{});
  const auto verdict = Spec::intern(spec.mesh(), all, {}, at::kByte);
  return redistribute_local(mine, *verdict, *replicated(*verdict), "equal").item<bool>();
}

void equal(const c10::OperatorHandle&, std::vector<c10::IValue>* stack) {
  const auto b = torch::jit::pop(stack).toTensor(), a = torch::jit::pop(stack).toTensor();
  stack->emplace_back(equal_everywhere(a, b));
}

} // namespace

void register_scalars(Registry& registry) {
  registry.add("_local_scalar_dense", Handler(local_scalar));
  registry.add("allclose", Decompose{});
  registry.add("equal", Handler(equal));
}

} // namespace tessera::internal::rules
