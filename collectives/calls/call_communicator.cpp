#include <tessera/collectives/calls/call_communicator.h>

namespace tessera::internal {

Work CallCommunicator::all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) {
  return run({.kind = CollectiveKind::kAllGather, .label = label, .output = output, .input = input});
}

Work CallCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) {
  return run({.kind = CollectiveKind::kReduceScatter, .label = label, .output = output, .input = input, .op = op});
}

Work CallCommunicator::reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& input, double factor,
                                             std::string_view label) {
  return run({.kind = CollectiveKind::kReduceScatter, .label = label, .output = output, .input = input, .factor = factor});
}

Work CallCommunicator::all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) {
  return run({.kind = CollectiveKind::kAllReduce, .label = label, .output = tensor, .input = tensor, .op = op});
}

Work CallCommunicator::all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                                  const std::vector<int64_t>& input_splits, std::string_view label) {
  return run({.kind = CollectiveKind::kAllToAll,
              .label = label,
              .output = output,
              .input = input,
              .splits = {.output = output_splits, .input = input_splits}});
}

Work CallCommunicator::broadcast(const at::Tensor& tensor, int root, std::string_view label) {
  return run({.kind = CollectiveKind::kBroadcast, .label = label, .output = tensor, .input = tensor, .peer = root});
}

Work CallCommunicator::send(const at::Tensor& tensor, int to, std::string_view label) {
  return run({.kind = CollectiveKind::kSend, .label = label, .input = tensor, .peer = to});
}

Work CallCommunicator::receive(const at::Tensor& tensor, int from, std::string_view label) {
  return run({.kind = CollectiveKind::kReceive, .label = label, .output = tensor, .peer = from});
}

void CallCommunicator::barrier(std::string_view label) { run({.kind = CollectiveKind::kBarrier, .label = label}).wait(); }

} // namespace tessera::internal
