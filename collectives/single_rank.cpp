#include <tessera/collectives/single_rank.h>

#include <tessera/collectives/call_communicator.h>
#include <tessera/collectives/checks.h>
#include <tessera/collectives/coalesced_calls.h>
#include <tessera/collectives/output_guard.h>

namespace tessera::internal {

namespace {

/// What its calls do is not counted, because nothing is sent.
class SingleRankCommunicator final : public CallCommunicator {
 public:
  SingleRankCommunicator(std::string name, int64_t rank, at::DeviceType device_type)
      : CallCommunicator(std::move(name), {rank}, 0, device_type) {}

  Work coalesced(const std::function<void()>& issue) override { return coalesced_.run(issue, name()); }

 private:
  Work run(CollectiveCall call) override {
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

  CoalescedCalls coalesced_;
};

} // namespace

CommunicatorPtr make_single_rank_communicator(std::string name, int64_t rank, at::DeviceType device_type) {
  return std::make_shared<SingleRankCommunicator>(std::move(name), rank, device_type);
}

} // namespace tessera::internal
