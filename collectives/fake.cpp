#include <tessera/collectives/fake.h>

#include <tessera/collectives/checks.h>
#include <tessera/collectives/coalesced_calls.h>
#include <tessera/collectives/output_guard.h>

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

class FakeCommunicator final : public Communicator {
 public:
  FakeCommunicator(std::string name, RankList ranks, int rank, at::DeviceType device_type)
      : Communicator(std::move(name), std::move(ranks), rank, device_type) {}

  Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) override {
    check_all_gather(*this, output, input, label);
    const OutputGuard guard(output);
    repeat(output, input);
    counters_.add(CollectiveKind::kAllGather, static_cast<int64_t>(output.nbytes()));
    return {};
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) override {
    check_reduce_scatter(*this, output, input, op, label);
    const OutputGuard guard(output);
    copy_into(output, input.view({-1}).narrow(0, rank() * output.numel(), output.numel()));
    reduce(output, op);
    counters_.add(CollectiveKind::kReduceScatter, static_cast<int64_t>(input.nbytes()));
    return {};
  }
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) override {
    check_all_reduce(*this, tensor, op, label);
    const OutputGuard guard(tensor);
    reduce(tensor, op);
    counters_.add(CollectiveKind::kAllReduce, static_cast<int64_t>(tensor.nbytes()));
    return {};
  }
  /// What the others send is this rank's own part, where they send as much.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits, std::string_view label) override {
    const auto splits = check_all_to_all(*this, output, input, output_splits, input_splits, label);
    const OutputGuard guard(output);
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
    counters_.add(CollectiveKind::kAllToAll, static_cast<int64_t>(std::max(output.nbytes(), input.nbytes())));
    return {};
  }
  Work broadcast(const at::Tensor& tensor, int root, std::string_view label) override {
    check_broadcast(*this, tensor, root, label);
    counters_.add(CollectiveKind::kBroadcast, static_cast<int64_t>(tensor.nbytes()));
    return {};
  }
  Work send(const at::Tensor& tensor, int to, std::string_view label) override {
    check_send(*this, tensor, to, label);
    counters_.add(CollectiveKind::kSend, static_cast<int64_t>(tensor.nbytes()));
    return {};
  }
  /// What the sender holds is not known here: the tensor keeps its values.
  Work receive(const at::Tensor& tensor, int from, std::string_view label) override {
    check_receive(*this, tensor, from, label);
    counters_.add(CollectiveKind::kReceive, static_cast<int64_t>(tensor.nbytes()));
    return {};
  }
  Work coalesced(const std::function<void()>& issue) override { return coalesced_.run(issue, name()); }
  void barrier(std::string_view) override { counters_.add(CollectiveKind::kBarrier, 0); }

 private:
  /// Of equal values: their mean, smallest and largest one is the value itself, and so is any reduction of bools.
  void reduce(const at::Tensor& tensor, ReduceOp op) const {
    if (tensor.scalar_type() == at::kBool) return;
    if (op == ReduceOp::kSum) tensor.mul_(size());
    if (op == ReduceOp::kProduct) tensor.pow_(size());
  }

  CoalescedCalls coalesced_;
};

} // namespace

CommunicatorPtr make_fake_communicator(std::string name, RankList ranks, int rank, at::DeviceType device_type) {
  return std::make_shared<FakeCommunicator>(std::move(name), std::move(ranks), rank, device_type);
}

} // namespace tessera::internal
