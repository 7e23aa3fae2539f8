#include <tessera/collectives/backends/single_rank.h>

#include <tessera/base/output_guard.h>
#include <tessera/collectives/calls/call_communicator.h>
#include <tessera/collectives/calls/checks.h>
#include <tessera/collectives/calls/coalesced_calls.h>

namespace tessera::internal {

namespace {

/// What its calls do is not counted, because nothing is sent.
class SingleRankCommunicator final : public CallCommunicator {
 public:
  SingleRankCommunicator(std::string name, int64_t rank, at::DeviceType device_type)
      : CallCommunicator(std::move(name), {rank}, 0, device_type) {}

  Work coalesced(const std::function<void()>& issue) override { return coalesced_.run(issue, name()); }

  Work run(CollectiveCall&& call) override {
    check(*this, call);
    const auto &output = call.output, &input = call.input;
    if (call.kind == CollectiveKind::kBarrier) return {};
    TORCH_CHECK(output.numel() == input.numel(), describe(*this, call), ": output has ", output.numel(), " elements, input ",
                input.numel());
    if (output.numel() == 0 || output.const_data_ptr() == input.const_data_ptr()) return {};
    const OutputGuard guard(output);
    output.view({-1}).copy_(input.view({-1}), /*non_blocking=*/true);
    return {};
  }

 private:
  CoalescedCalls coalesced_;
};

} // namespace

CommunicatorPtr make_single_rank_communicator(std::string name, int64_t rank, at::DeviceType device_type) {
  return std::make_shared<SingleRankCommunicator>(std::move(name), rank, device_type);
}

} // namespace tessera::internal
