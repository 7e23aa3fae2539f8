#include <tessera/collectives/calls/collective_call.h>

namespace tessera::internal {

namespace {

int64_t bytes_if_dense(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

} // namespace

std::vector<int64_t> AllToAllSplits::byte_counts(int64_t width) const {
  std::vector<int64_t> counts;
  for (const auto* list : {&input, &output})
    for (const auto split : *list) counts.push_back(split * width);
  return counts;
}

const at::Tensor& CollectiveCall::full() const {
  switch (kind) {
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kSend: return input;
    case CollectiveKind::kAllToAll: return bytes_if_dense(output) > bytes_if_dense(input) ? output : input;
    default: return output;
  }
}

int64_t CollectiveCall::bytes() const { return bytes_if_dense(full()); }

Signature CollectiveCall::signature() const {
  const auto dtype = full().defined() ? full().scalar_type() : at::kByte;
  return make_signature(kind, label, dtype, bytes(), op, kind == CollectiveKind::kBroadcast ? peer : -1);
}

Work CollectiveCall::issue_on(Communicator& other) const {
  switch (kind) {
    case CollectiveKind::kAllGather: return other.all_gather_into(output, input, label);
    case CollectiveKind::kReduceScatter:
      return factor ? other.reduce_scatter_scaled(output, input, *factor, label) : other.reduce_scatter(output, input, op, label);
    case CollectiveKind::kAllReduce: return other.all_reduce(output, op, label);
    case CollectiveKind::kAllToAll: return other.all_to_all(output, input, splits.output, splits.input, label);
    case CollectiveKind::kBroadcast: return other.broadcast(output, peer, label);
    case CollectiveKind::kSend: return other.send(input, peer, label);
    case CollectiveKind::kReceive: return other.receive(output, peer, label);
    case CollectiveKind::kBarrier: other.barrier(label);
  }
  return {};
}

} // namespace tessera::internal
