#include <tessera/dtensor/redistribute/transition.h>

namespace tessera::redistribute {

at::Tensor all_reduce(const at::Tensor& local, const Transition& transition) {
  const auto& partial = std::get<Partial>(transition.from);
  if (transition.ranks() == 1 || local.numel() == 0) return partial.op == Partial::Op::kNorm ? local.abs() : local;
  auto buffer = encode(local, partial).contiguous();
  transition.communicator()->all_reduce(buffer.view(-1), wire_op(partial), transition.label).wait();
  return decode(buffer, partial, local.scalar_type());
}

} // namespace tessera::redistribute
