#include <tessera/dtensor/redistribute/transition.h>

namespace tessera::internal::redistribute {

at::Tensor all_reduce(const at::Tensor& local, const Transition& transition) {
  const auto& partial = std::get<Partial>(transition.from);
  if (transition.ranks() == 1 || local.numel() == 0) return partial.op == Partial::Op::kNorm ? local.abs() : local;
  auto buffer = encode(local, partial).contiguous();
  wait_for(transition.communicator()->all_reduce(buffer.view(-1), wire_op(partial), transition.label), transition);
  return after(buffer, transition,
               [partial, dtype = local.scalar_type()](const at::Tensor& reduced) { return decode(reduced, partial, dtype); });
}

} // namespace tessera::internal::redistribute
