#include <tessera/collectives/calls/checks.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <numeric>

namespace tessera::internal {

namespace {

constexpr std::array kReducible{at::kBool, at::kByte, at::kChar,     at::kShort, at::kInt,
                                at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};

struct Checks {
  const Communicator& group;
  const CollectiveCall& call;

  std::string text() const { return describe(group, call); }

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

  void check_pair() const {
    const auto &output = call.output, &input = call.input;
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

  /// One rank's is `part`, those of all are `whole`.
  void check_sizes(const at::Tensor& whole, const char* whole_name, const at::Tensor& part, const char* part_name) const {
    TORCH_CHECK(whole.numel() == group.size() * part.numel(), text(), ": ", whole_name, " has ", whole.numel(),
                " elements, needed are ", group.size(), " times the ", part_name, "'s ", part.numel());
  }

  void check_op() const {
    const auto op = call.op;
    const auto& tensor = call.input;
    TORCH_CHECK(op >= ReduceOp::kSum && op <= ReduceOp::kProduct, text(), ": there is no reduction ", static_cast<int>(op));
    TORCH_CHECK(std::find(kReducible.begin(), kReducible.end(), tensor.scalar_type()) != kReducible.end(), text(),
                ": tensors of ", tensor.scalar_type(), " are not reduced; ",
                tensor.is_complex() ? "pass at::view_as_real(tensor)" : "cast them to a wider type");
    TORCH_CHECK(op != ReduceOp::kAvg || at::isFloatingType(tensor.scalar_type()), text(), ": the average of ",
                tensor.scalar_type(), " is not defined, reduce with sum");
    TORCH_CHECK_NOT_IMPLEMENTED(!call.factor || group.scales(tensor.scalar_type()), text(), ": this communicator scales no ",
                                tensor.scalar_type());
  }

  void check_peer() const {
    const bool is_root = call.kind == CollectiveKind::kBroadcast;
    TORCH_CHECK(call.peer >= 0 && call.peer < group.size(), text(), is_root ? ": root " : ": peer ", call.peer, " is not in [0, ",
                group.size(), ")");
    TORCH_CHECK(is_root || call.peer != group.rank(), text(), ": the peer is this rank itself");
  }

  /// Checks the splits of `tensor`, and makes equal ones where there are none.
  void complete(std::vector<int64_t>& splits, const at::Tensor& tensor, const char* name) const {
    const int64_t size = group.size();
    if (splits.empty()) {
      TORCH_CHECK(tensor.numel() % size == 0, text(), ": ", name, " has ", tensor.numel(), " elements, which do not divide into ",
                  size, " equal parts");
      splits.assign(size, tensor.numel() / size);
      return;
    }
    TORCH_CHECK(static_cast<int64_t>(splits.size()) == size, text(), ": ", splits.size(), " ", name, " splits for ", size,
                " ranks");
    for (const auto split : splits) TORCH_CHECK(split >= 0, text(), ": ", name, " split ", split, " is negative");
    const auto sum = std::accumulate(splits.begin(), splits.end(), int64_t{0});
    TORCH_CHECK(sum == tensor.numel(), text(), ": the ", name, " splits sum to ", sum, ", ", name, " has ", tensor.numel(),
                " elements");
  }

  void check_all() const {
    switch (call.kind) {
      case CollectiveKind::kAllGather:
        check_pair();
        check_sizes(call.output, "output", call.input, "input");
        return check_place(call.output, call.input, "input lies in output");
      case CollectiveKind::kReduceScatter:
        check_pair();
        check_op();
        check_sizes(call.input, "input", call.output, "output");
        return check_place(call.input, call.output, "output lies in input");
      case CollectiveKind::kAllReduce: check_tensor(call.input, "tensor"); return check_op();
      case CollectiveKind::kAllToAll:
        check_pair();
        TORCH_CHECK(!overlap(call.output, call.input), text(), ": input and output overlap");
        return;
      case CollectiveKind::kBroadcast:
      case CollectiveKind::kSend:
      case CollectiveKind::kReceive: check_tensor(call.full(), "tensor"); return check_peer();
      case CollectiveKind::kBarrier: return;
    }
  }
};

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

void check(const Communicator& group, CollectiveCall& call) {
  const Checks checks{group, call};
  checks.check_all();
  if (call.kind != CollectiveKind::kAllToAll) return;
  checks.complete(call.splits.output, call.output, "output");
  checks.complete(call.splits.input, call.input, "input");
}

} // namespace tessera::internal
