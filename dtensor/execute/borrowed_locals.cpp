#include <tessera/dtensor/execute/borrowed_locals.h>

#include <absl/algorithm/container.h>

#include <tessera/dtensor/redistribute/redistribute.h>

namespace tessera::internal::dispatch {

namespace {

/// A reduced value that is put into the parts of a norm, or of a maximum or minimum, stays in those parts that lie in no other
/// tensor: a later write to the other tensor would not show.
bool stays_in_parts(const Placement& placement) {
  const auto* partial = std::get_if<Partial>(&placement);
  return partial && (is_norm(placement) || partial->op == Partial::Op::kMax || partial->op == Partial::Op::kMin);
}

} // namespace

at::Tensor BorrowedLocals::take(DTensorMeta& meta, const SpecPtr& target, const std::string& op) {
  for (const auto& loan : loans_) {
    if (loan.meta == &meta) return loan.local;
  }
  TORCH_CHECK(absl::c_none_of(meta.spec->placements(), stays_in_parts), op, ": the written tensor, ", meta.spec->to_string(),
              ", would have to be reduced, which a tensor whose memory another one shares cannot be in place. Write a clone() of "
              "it, or take views after the write");
  auto local = redistribute_local(meta.local, *meta.spec, *target, op);
  if (local.is_alias_of(meta.local)) local = local.clone();
  loans_.push_back({&meta, target, local});
  return local;
}

void BorrowedLocals::give_back(const std::string& op) const {
  for (const auto& [meta, target, local] : loans_) {
    TORCH_CHECK(local.sizes() == c10::IntArrayRef(target->local_sizes()), op, ": the result has shape ", local.sizes(),
                ", but the written DTensor is ", target->to_string(), ", and is not resized");
    meta->local.copy_(redistribute_local(local, *target, *meta->spec, op));
  }
}

} // namespace tessera::internal::dispatch
