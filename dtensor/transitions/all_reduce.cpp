#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal::redistribute {

at::Tensor all_reduce(const at::Tensor& local, const Transition& transition) {
  const auto& partial = std::get<Partial>(transition.from);
  if (transition.ranks() == 1 || local.numel() == 0) return partial.op == Partial::Op::kNorm ? local.abs() : local;
  const auto communicator = transition.communicator();
  auto buffer = encode(local, partial, *communicator).contiguous();
  const auto op = wire_op(partial, local.scalar_type());
  wait_for(communicator->all_reduce(buffer.view(-1), op, transition.label), transition);
  return after(buffer, transition,
               [partial, dtype = local.scalar_type()](const at::Tensor& reduced) { return decode(reduced, partial, dtype); });
}

} // namespace tessera::internal::redistribute
