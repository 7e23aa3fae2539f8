#include <tessera/reads/kind.h>

#include <atomic>
#include <typeinfo>

namespace tessera::internal {

namespace {

/// The memory of a plain tensor with the key; null where it was replaced. A cast takes longer than all else that is looked at in
/// an argument, so that the class of the last memory is remembered.
const ReadStorage* read_storage(const at::Tensor& tensor) {
  static std::atomic<const std::type_info*> last = nullptr;
  const auto* const storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (!storage) return nullptr;
  const auto& type = typeid(*storage);
  if (C10_LIKELY(&type == last.load(std::memory_order_relaxed))) return static_cast<const ReadStorage*>(storage);
  const auto* const read = dynamic_cast<const ReadStorage*>(storage);
  if (read) last.store(&type, std::memory_order_relaxed);
  return read;
}

} // namespace

const ReadKind* kind_of(const at::Tensor& tensor) {
  if (const auto* const meta = read_meta(tensor)) return meta->kind;
  const auto* const storage = read_storage(tensor);
  return storage ? storage->kind : nullptr;
}

} // namespace tessera::internal
