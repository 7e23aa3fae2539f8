#include <tessera/parallel/stages/foreign.h>

#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <utility>

#include <tessera/base/dispatch_keys.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/reads/read_call.h>

namespace tessera::internal::pipeline {

namespace {

constinit PerThread<const std::string*> stage_here; // null: no stage

class ForeignKind final : public ReadKind {
 public:
  constexpr ForeignKind() : ReadKind(Turn::kRefuses) {}
  MetSet meets(const at::Tensor&, size_t, const OperatorTraits&) const override { return {}; }
  void on_read(ReadCall& call) const override;
};
constexpr ForeignKind kForeign;

class ForeignStorage final : public ReadStorage {
 public:
  explicit ForeignStorage(std::function<std::string()> of_read) : ReadStorage(c10::kMeta, kForeign), error(std::move(of_read)) {}
  const std::function<std::string()> error;
};

const ForeignStorage* foreign_storage(const at::Tensor& tensor) {
  return dynamic_cast<const ForeignStorage*>(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

void ForeignKind::on_read(ReadCall& call) const {
  if (call.traits.is_metadata_only) return call.proceed();
  dispatch::visit_tensors(call.traits, call.arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* foreign = tensor.key_set().has(kTouchKey) ? foreign_storage(tensor) : nullptr;
    if (!foreign) return;
    const auto& op = call.op.schema().name();
    TORCH_CHECK(false, op.substr(op.find("::") + 2), " (rank ", process_context().rank(), "): ", foreign->error());
  });
  call.proceed();
}

} // namespace

void make_foreign(const at::Tensor& tensor, std::string name, std::string owner) {
  make_foreign(tensor, [name = std::move(name), owner = std::move(owner)] { return foreign_read(name, owner, current_stage()); });
}

void make_foreign(const at::Tensor& tensor, std::function<std::string()> error) {
  const auto sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::Meta).add(kTouchKey);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(c10::make_intrusive<ForeignStorage>(std::move(error))), keys,
                                                   tensor.dtype());
  impl->set_sizes_and_strides(sizes, strides);
  tensor.unsafeGetTensorImpl()->shallow_copy_from(impl);
}

StageScope::StageScope(const std::string& stage) : stage_(*stage_here, &stage) {}

std::string current_stage() { return *stage_here ? **stage_here : "no stage"; }

std::string foreign_read(const std::string& name, const std::string& owner, const std::string& reader) {
  return c10::str(reader, " reads ", name, " of ", owner, ". A stage computes with what its own layers have: list ", name,
                  " as a member of both layers, and declare it with PipelineLayers::tie");
}

} // namespace tessera::internal::pipeline
