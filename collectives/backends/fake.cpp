#include <tessera/collectives/backends/fake.h>

#include <tessera/base/output_guard.h>
#include <tessera/collectives/calls/checked_communicator.h>

#include <algorithm>
#include <cstring>

namespace tessera::internal {

namespace {

void copy_into(const at::Tensor& output, const at::Tensor& input) {
  if (input.numel() == 0 || input.is_meta() || output.const_data_ptr() == input.const_data_ptr()) return;
  if (input.is_cpu()) { // many small ones: an operator would cost more than the bytes
    std::memcpy(output.mutable_data_ptr(), input.const_data_ptr(), input.nbytes());
  } else {
    output.view({-1}).copy_(input.view({-1}), /*non_blocking=*/true);
  }
}

/// As often as it fits: in one launch, or doubled, so that many ranks are a few copies. `input` may be the view of `output` at
/// one of its places.
void repeat(const at::Tensor& output, const at::Tensor& input) {
  if (input.numel() == 0 || input.is_meta()) return;
  if (!input.is_cpu()) {
    const auto rows = output.view({-1, input.numel()});
    rows.copy_(input.view({-1}).expand_as(rows), /*non_blocking=*/true);
    return;
  }
  const auto flat = output.view({-1});
  copy_into(flat.narrow(0, 0, input.numel()), input);
  for (int64_t done = input.numel(); done < flat.numel(); done *= 2) {
    const int64_t count = std::min(done, flat.numel() - done);
    copy_into(flat.narrow(0, done, count), flat.narrow(0, 0, count));
  }
}

class FakeCommunicator final : public CheckedCommunicator {
 public:
  FakeCommunicator(std::string name, RankList ranks, int rank, at::DeviceType device_type)
      : CheckedCommunicator(std::move(name), std::move(ranks), rank, device_type) {}

 private:
  Work start(CollectiveCall&& call) override {
    const auto &output = call.output, &input = call.input;
    const OutputGuard guard(output);
    switch (call.kind) {
      case CollectiveKind::kAllGather: repeat(output, input); break;
      case CollectiveKind::kReduceScatter:
        copy_into(output, input.view({-1}).narrow(0, rank() * output.numel(), output.numel()));
        reduce(output, call.op);
        break;
      case CollectiveKind::kAllReduce: reduce(output, call.op); break;
      case CollectiveKind::kAllToAll: exchange(output, input, call.splits); break;
      case CollectiveKind::kBroadcast:
      case CollectiveKind::kReceive: // what the sender holds is not known here: the tensor keeps its values
      case CollectiveKind::kSend:
      case CollectiveKind::kBarrier: break;
    }
    return {};
  }

  /// Of equal values: their mean, smallest and largest one is the value itself, and so is any reduction of bools.
  void reduce(const at::Tensor& tensor, ReduceOp op) const {
    if (tensor.scalar_type() == at::kBool) return;
    if (op == ReduceOp::kSum) tensor.mul_(size());
    if (op == ReduceOp::kProduct) tensor.pow_(size());
  }

  /// What the others send is this rank's own part, where they send as much.
  void exchange(const at::Tensor& output, const at::Tensor& input, const AllToAllSplits& splits) const {
    int64_t sent = 0, received = 0;
    for (int place = 0; place < rank(); ++place) sent += splits.input[place];
    const auto own = input.view({-1}).narrow(0, sent, splits.input[rank()]), flat = output.view({-1});
    for (const auto count : splits.output) {
      const auto part = flat.narrow(0, received, count);
      if (count == own.numel()) {
        copy_into(part, own);
      } else {
        part.zero_();
      }
      received += count;
    }
  }
};

} // namespace

CommunicatorPtr make_fake_communicator(std::string name, RankList ranks, int rank, at::DeviceType device_type) {
  return std::make_shared<FakeCommunicator>(std::move(name), std::move(ranks), rank, device_type);
}

} // namespace tessera::internal
