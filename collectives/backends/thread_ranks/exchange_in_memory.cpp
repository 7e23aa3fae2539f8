#include <tessera/collectives/backends/thread_ranks/exchange_in_memory.h>

#include <tessera/collectives/sums/reduce.h>

#include <c10/util/Exception.h>

#include <cstring>
#include <numeric>

namespace tessera::internal {

namespace {

using Members = std::vector<Contribution>;

const char* read(const at::Tensor& tensor, int64_t element = 0) {
  return static_cast<const char*>(tensor.const_data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}
char* write(const at::Tensor& tensor, int64_t element = 0) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}
void copy(char* to, const char* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}
int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

void all_gather(const Members& members) {
  for (const auto& receiver : members) {
    for (size_t i = 0; i < members.size(); ++i) {
      const auto& input = members[i].input;
      copy(write(receiver.output, static_cast<int64_t>(i) * input.numel()), read(input), bytes_of(input));
    }
  }
}

void reduce_scatter(const Members& members, ReduceOp op) {
  for (size_t i = 0; i < members.size(); ++i) {
    const auto& output = members[i].output;
    std::vector<const void*> inputs;
    for (const auto& member : members) inputs.push_back(read(member.input, static_cast<int64_t>(i) * output.numel()));
    if (output.numel() > 0) reduce(write(output), inputs, output.numel(), output.scalar_type(), op);
  }
}

void all_reduce(const Members& members, ReduceOp op) {
  std::vector<const void*> inputs;
  for (const auto& member : members) inputs.push_back(read(member.output));
  const auto& first = members[0].output;
  if (first.numel() == 0) return;
  reduce(write(first), inputs, first.numel(), first.scalar_type(), op);
  for (const auto& member : members) copy(write(member.output), read(first), bytes_of(first));
}

void all_to_all(const Members& members) {
  const auto before = [](const std::vector<int64_t>& counts, size_t end) {
    return std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(end), int64_t{0});
  };
  for (size_t to = 0; to < members.size(); ++to) {
    for (size_t from = 0; from < members.size(); ++from) {
      const auto &sender = members[from], &receiver = members[to];
      const auto sent = sender.splits.input[to], expected = receiver.splits.output[from];
      TORCH_CHECK(sent == expected, "rank ", from, " of the group sends ", sent, " elements to rank ", to, ", which expects ",
                  expected);
      copy(write(receiver.output, before(receiver.splits.output, from)), read(sender.input, before(sender.splits.input, to)),
           sent * static_cast<int64_t>(sender.input.element_size()));
    }
  }
}

} // namespace

void exchange_in_memory(const Members& members) {
  const auto& signature = members[0].signature;
  const auto op = static_cast<ReduceOp>(signature.reduce_op);
  switch (static_cast<CollectiveKind>(signature.kind)) {
    case CollectiveKind::kAllGather: return all_gather(members);
    case CollectiveKind::kReduceScatter: return reduce_scatter(members, op);
    case CollectiveKind::kAllReduce: return all_reduce(members, op);
    case CollectiveKind::kAllToAll: return all_to_all(members);
    case CollectiveKind::kBroadcast: {
      const auto& whole = members[static_cast<size_t>(signature.root)].output;
      for (const auto& member : members) copy(write(member.output), read(whole), bytes_of(whole));
      return;
    }
    case CollectiveKind::kSend:
    case CollectiveKind::kReceive: return copy(write(members[1].output), read(members[0].input), bytes_of(members[0].input));
    case CollectiveKind::kBarrier: return;
  }
}

} // namespace tessera::internal
