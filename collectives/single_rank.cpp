#include <tessera/collectives/single_rank.h>

#include <tessera/collectives/checks.h>
#include <tessera/collectives/coalesced_calls.h>
#include <tessera/collectives/output_guard.h>

namespace tessera::internal {

namespace {

Work copy_into(const at::Tensor& output, const at::Tensor& input) {
  if (output.numel() == 0 || output.const_data_ptr() == input.const_data_ptr()) return {};
  const OutputGuard guard(output);
  output.view({-1}).copy_(input.view({-1}), /*non_blocking=*/true);
  return {};
}

class SingleRankCommunicator final : public Communicator {
 public:
  SingleRankCommunicator(std::string name, int64_t rank, at::DeviceType device_type)
      : Communicator(std::move(name), {rank}, 0, device_type) {}

  Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) override {
    check_all_gather(*this, output, input, label);
    return copy_into(output, input);
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) override {
    check_reduce_scatter(*this, output, input, op, label);
    return copy_into(output, input);
  }
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) override {
    check_all_reduce(*this, tensor, op, label);
    return {};
  }
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits, std::string_view label) override {
    check_all_to_all(*this, output, input, output_splits, input_splits, label);
    TORCH_CHECK(output.numel() == input.numel(), describe(*this, CollectiveKind::kAllToAll, label), ": output has ",
                output.numel(), " elements, input ", input.numel());
    return copy_into(output, input);
  }
  Work broadcast(const at::Tensor& tensor, int root, std::string_view label) override {
    check_broadcast(*this, tensor, root, label);
    return {};
  }
  Work coalesced(const std::function<void()>& issue) override { return coalesced_.run(issue, name()); }
  void barrier(std::string_view) override {}

 private:
  CoalescedCalls coalesced_;
};

} // namespace

CommunicatorPtr make_single_rank_communicator(std::string name, int64_t rank, at::DeviceType device_type) {
  return std::make_shared<SingleRankCommunicator>(std::move(name), rank, device_type);
}

} // namespace tessera::internal
