#include <tessera/dtensor/calls/call_site.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/calls/op_info.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/strict_sharding.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/program_scopes.h>

namespace tessera {

ImplicitReplication::ImplicitReplication()
    : scope_(internal::open_scope([](auto& scopes) { scopes.implicit_replication = true; })) {}
StrictSharding::StrictSharding() : scope_(internal::open_scope([](auto& scopes) { scopes.strict_sharding = true; })) {}

namespace internal::dispatch {

namespace {

constinit PerThread<Decompositions> current;

/// Whether a DTensor that the call writes shares its memory with others.
bool shares_what_it_writes(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  return any_tensor(info, arguments, [&](const at::Tensor& tensor, size_t i) {
    const auto* meta = info.arguments[i].written ? dtensor_meta(tensor) : nullptr;
    return meta && shares_memory(*meta);
  });
}

bool is_program_value(const at::Tensor& plain) { return plain.dim() > 0 && !dtensor_meta(plain) && !has_only_zeros(plain); }

/// Whether the call may be autograd's sum of gradients: a formula made plain zeros for one of them. In place it adds to these
/// alone.
bool adds_gradients(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  const bool in_place = info.name == "aten::add_.Tensor";
  if (!(in_place || info.name == "aten::add.Tensor")) return false;
  const auto& sum = arguments[0].toTensor();
  if (in_place && (sum.dim() == 0 || dtensor_meta(sum))) return false;
  return !any_tensor(info, arguments, [](const at::Tensor& tensor, size_t) { return is_program_value(tensor); });
}

} // namespace

const Decompositions& decompositions() { return *current; }
bool replicates_plain_tensors() { return current->all_dtensors || program_scopes().implicit_replication; }

Decompositions Decompositions::inside(bool has_only_dtensors, bool writes_argument) const {
  return {depth + 1, all_dtensors || has_only_dtensors, own_temporaries || (has_only_dtensors && !writes_argument)};
}

DecompositionScope::DecompositionScope(bool all_dtensors, bool writes_argument)
    : current_(*current, current->inside(all_dtensors, writes_argument)) {}

CallSite::CallSite(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments)
    : info_(info),
      arguments_(arguments),
      own_temporaries_(current->own_temporaries || (info.plan_depends_on_caller && is_of_formula())),
      shares_written_(own_temporaries_ && info.writes && shares_what_it_writes(info, arguments)) {}

bool CallSite::is_of_formula() {
  if (!origin_) origin_ = call_origin();
  return *origin_ == CallOrigin::kFormula || (*origin_ == CallOrigin::kBesideFormula && adds_gradients(info_, arguments_));
}

bool CallSite::ask_own_temporaries() { return own_temporaries_ = own_temporaries_ || is_of_formula(); }

} // namespace internal::dispatch
} // namespace tessera
