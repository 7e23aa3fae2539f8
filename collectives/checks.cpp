#include <tessera/collectives/checks.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <numeric>

namespace tessera::internal {

namespace {

constexpr std::array kReducible{at::kBool, at::kByte, at::kChar,     at::kShort, at::kInt,
                                at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};

struct Call {
  const Communicator& group;
  CollectiveKind kind;
  std::string_view label;

  std::string text() const { return describe(group, kind, label); }

  void check_tensor(const at::Tensor& tensor, const char* name) const {
    TORCH_CHECK(tensor.defined(), text(), ": ", name, " is undefined");
    TORCH_CHECK(tensor.device().type() == group.device_type(), text(), ": ", name, " is on ", tensor.device(),
                ", the group's tensors are on ", group.device_type());
    TORCH_CHECK(tensor.layout() == at::kStrided && tensor.is_contiguous(), text(), ": ", name, " of sizes ", tensor.sizes(),
                " is not contiguous");
    TORCH_CHECK(tensor.has_storage() && !tensor._is_zerotensor(), text(), ": ", name, " has no memory; pass ", name, ".clone()");
    TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), text(), ": ", name, " is a lazily ",
                tensor.is_conj() ? "conjugated" : "negated", " view, whose memory has other values; pass ", name,
                tensor.is_conj() ? ".resolve_conj()" : ".resolve_neg()");
  }

  void check_pair(const at::Tensor& output, const at::Tensor& input) const {
    check_tensor(output, "output");
    check_tensor(input, "input");
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), text(), ": output is ", output.scalar_type(), " and input is ",
                input.scalar_type(), ", they must be equal");
  }

  /// `part` may lie in `whole` at this rank's place, and must not overlap it anywhere else.
  void check_place(const at::Tensor& whole, const at::Tensor& part, const char* where) const {
    if (!overlap(whole, part)) return;
    const auto* const own = static_cast<const char*>(whole.const_data_ptr()) + group.rank() * part.nbytes();
    TORCH_CHECK(part.const_data_ptr() == own, text(), ": ", where, ", but not at this rank's place");
  }

  void check_op(ReduceOp op, const at::Tensor& tensor) const {
    TORCH_CHECK(op >= ReduceOp::kSum && op <= ReduceOp::kProduct, text(), ": there is no reduction ", static_cast<int>(op));
    TORCH_CHECK(std::find(kReducible.begin(), kReducible.end(), tensor.scalar_type()) != kReducible.end(), text(),
                ": tensors of ", tensor.scalar_type(), " are not reduced; ",
                tensor.is_complex() ? "pass at::view_as_real(tensor)" : "cast them to a wider type");
    TORCH_CHECK(op != ReduceOp::kAvg || at::isFloatingType(tensor.scalar_type()), text(), ": the average of ",
                tensor.scalar_type(), " is not defined, reduce with sum");
  }
};

std::vector<int64_t> equal_splits(const Call& call, const at::Tensor& tensor, const char* name) {
  const int64_t size = call.group.size();
  TORCH_CHECK(tensor.numel() % size == 0, call.text(), ": ", name, " has ", tensor.numel(),
              " elements, which do not divide into ", size, " equal parts");
  return std::vector<int64_t>(size, tensor.numel() / size);
}

std::vector<int64_t> check_splits(const Call& call, const at::Tensor& tensor, const std::vector<int64_t>& splits,
                                  const char* name) {
  if (splits.empty()) return equal_splits(call, tensor, name);
  TORCH_CHECK(static_cast<int>(splits.size()) == call.group.size(), call.text(), ": ", splits.size(), " ", name, " splits for ",
              call.group.size(), " ranks");
  for (const auto split : splits) TORCH_CHECK(split >= 0, call.text(), ": ", name, " split ", split, " is negative");
  const auto sum = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  TORCH_CHECK(sum == tensor.numel(), call.text(), ": the ", name, " splits sum to ", sum, ", ", name, " has ", tensor.numel(),
              " elements");
  return splits;
}

} // namespace

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_meta() || a.nbytes() == 0 || b.nbytes() == 0) return false;
  const auto* const first = static_cast<const char*>(a.const_data_ptr());
  const auto* const second = static_cast<const char*>(b.const_data_ptr());
  return first < second + b.nbytes() && second < first + a.nbytes();
}

std::string describe(const Communicator& group, CollectiveKind kind, std::string_view label) {
  return c10::str(to_string(kind), " '", label, "' of group ", group.name(), " [", c10::Join(", ", group.ranks()), "] on rank ",
                  group.ranks()[group.rank()]);
}

std::string describe(const Communicator& group, const CollectiveCall& call) { return describe(group, call.kind, call.label); }

void check_all_gather(const Communicator& group, const at::Tensor& output, const at::Tensor& input, std::string_view label) {
  const Call call{group, CollectiveKind::kAllGather, label};
  call.check_pair(output, input);
  TORCH_CHECK(output.numel() == group.size() * input.numel(), call.text(), ": output has ", output.numel(),
              " elements, needed are ", group.size(), " times the input's ", input.numel());
  call.check_place(output, input, "input lies in output");
}

void check_reduce_scatter(const Communicator& group, const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                          std::string_view label) {
  const Call call{group, CollectiveKind::kReduceScatter, label};
  call.check_pair(output, input);
  call.check_op(op, input);
  TORCH_CHECK(input.numel() == group.size() * output.numel(), call.text(), ": input has ", input.numel(),
              " elements, needed are ", group.size(), " times the output's ", output.numel());
  call.check_place(input, output, "output lies in input");
}

void check_all_reduce(const Communicator& group, const at::Tensor& tensor, ReduceOp op, std::string_view label) {
  const Call call{group, CollectiveKind::kAllReduce, label};
  call.check_tensor(tensor, "tensor");
  call.check_op(op, tensor);
}

void check_broadcast(const Communicator& group, const at::Tensor& tensor, int root, std::string_view label) {
  const Call call{group, CollectiveKind::kBroadcast, label};
  call.check_tensor(tensor, "tensor");
  TORCH_CHECK(root >= 0 && root < group.size(), call.text(), ": root ", root, " is not in [0, ", group.size(), ")");
}

namespace {

void check_message(const Communicator& group, CollectiveKind kind, const at::Tensor& tensor, int peer, std::string_view label) {
  const Call call{group, kind, label};
  call.check_tensor(tensor, "tensor");
  TORCH_CHECK(peer >= 0 && peer < group.size(), call.text(), ": peer ", peer, " is not in [0, ", group.size(), ")");
  TORCH_CHECK(peer != group.rank(), call.text(), ": the peer is this rank itself");
}

} // namespace

void check_send(const Communicator& group, const at::Tensor& tensor, int to, std::string_view label) {
  check_message(group, CollectiveKind::kSend, tensor, to, label);
}

void check_receive(const Communicator& group, const at::Tensor& tensor, int from, std::string_view label) {
  check_message(group, CollectiveKind::kReceive, tensor, from, label);
}

AllToAllSplits check_all_to_all(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                                const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
                                std::string_view label) {
  const Call call{group, CollectiveKind::kAllToAll, label};
  call.check_pair(output, input);
  TORCH_CHECK(!overlap(output, input), call.text(), ": input and output overlap");
  return {check_splits(call, output, output_splits, "output"), check_splits(call, input, input_splits, "input")};
}

void check(const Communicator& group, CollectiveCall& call) {
  const auto& [kind, label, output, input, op, factor, peer, splits] = call;
  TORCH_CHECK_NOT_IMPLEMENTED(!factor || !input.defined() || group.scales(input.scalar_type()), describe(group, call),
                              ": this communicator scales no ", input.scalar_type());
  switch (kind) {
    case CollectiveKind::kAllGather: return check_all_gather(group, output, input, label);
    case CollectiveKind::kReduceScatter: return check_reduce_scatter(group, output, input, op, label);
    case CollectiveKind::kAllReduce: return check_all_reduce(group, output, op, label);
    case CollectiveKind::kAllToAll:
      call.splits = check_all_to_all(group, output, input, splits.output, splits.input, label);
      return;
    case CollectiveKind::kBroadcast: return check_broadcast(group, output, peer, label);
    case CollectiveKind::kSend: return check_send(group, input, peer, label);
    case CollectiveKind::kReceive: return check_receive(group, output, peer, label);
    case CollectiveKind::kBarrier: return;
  }
}

} // namespace tessera::internal
