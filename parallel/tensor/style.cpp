#include <tessera/parallel/tensor/style.h>

#include <utility>

namespace tessera::internal::parallel {

StyledMeta::StyledMeta(const DTensorMeta& of, std::shared_ptr<const Style> own_style, bool casts_beside)
    : ReadMeta(of.local, of.spec, kStyledParameters), style(std::move(own_style)), casts(casts_beside) {
  keeps_reduced = of.keeps_reduced;
  copied_at_version = of.copied_at_version;
  provenance = of.provenance;
}

void Style::put_on(const at::Tensor& dtensor, bool casts) const {
  auto meta = c10::make_intrusive<StyledMeta>(*dtensor_meta(dtensor), shared_from_this(), casts);
  become_dtensor(dtensor, std::move(meta), c10::DispatchKeySet(kTouchKey));
}

StyledMeta* styled_meta(const at::TensorBase& tensor) {
  auto* const meta = read_meta(tensor);
  return meta && meta->kind == &kStyledParameters ? static_cast<StyledMeta*>(meta) : nullptr;
}

} // namespace tessera::internal::parallel
