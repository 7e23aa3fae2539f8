// Random collectives over shared memory, or over several hosts, give what they give over gloo, bit by bit.
#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/hosts.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

#include <tessera/collectives/backends/backend.h>
#include <tessera/collectives/backends/shared_memory/memory/arenas.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/group_store.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <thread>

namespace tessera::transports_test {
namespace {

const std::vector<at::ScalarType> kDtypes{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong,
                                          at::kInt,   at::kShort,  at::kChar,     at::kByte, at::kBool};

/// Makes groups of this job over a transport of the test's choice.
class Groups {
 public:
  Groups() {
    auto& context = process_context();
    const auto store = context.store();
    const auto key = [](int rank) { return c10::str("transports/process/", rank); };
    store->set(key(context.rank()), internal::RankWatch::own_process());
    std::vector<std::string> processes;
    for (int rank = 0; rank < context.world_size(); ++rank) processes.push_back(store->get_to_str(key(rank)));
    watch_ = std::make_shared<internal::RankWatch>(context.rank(), processes, store, store);
  }

  CommunicatorPtr make(const std::vector<int64_t>& ranks, Transport transport, const std::string& name) const {
    auto& context = process_context();
    internal::GroupDescription group;
    group.name = name;
    group.ranks = ranks;
    group.rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), context.rank()) - ranks.begin());
    group.options = context.options();
    group.options.transport = transport;
    if (const auto hosts = testing::simulated_hosts(); !hosts.empty()) group.hosts = number_hosts(ranks, hosts);
    group.watch = watch_;
    group.arenas = arenas_;
    const auto prefix = c10::str("transports/", name, "/", static_cast<int>(transport));
    group.store = c10::make_intrusive<internal::GroupStore>(prefix, context.store(), ranks, watch_);
    return internal::make_backend_communicator(group, at::kCPU);
  }

 private:
  /// In the order of their first ranks.
  static std::vector<int> number_hosts(const std::vector<int64_t>& ranks, const std::vector<int>& hosts) {
    std::map<int, int> numbers;
    std::vector<int> numbered;
    for (const auto rank : ranks)
      numbered.push_back(numbers.emplace(hosts[rank], static_cast<int>(numbers.size())).first->second);
    return numbered;
  }

  std::shared_ptr<internal::RankWatch> watch_;
  std::shared_ptr<internal::shared_memory::Arenas> arenas_ = std::make_shared<internal::shared_memory::Arenas>();
};

/// One drawn call. Every rank draws the same, and its own data.
struct Call {
  CollectiveKind kind;
  at::ScalarType dtype;
  ReduceOp op;
  int64_t numel;
  int root, peer;
  bool in_place;
  uint64_t data_seed;
  std::vector<int64_t> counts; // of an all_to_all: from rank s to rank r at s * size + r
};

template <typename T>
void shuffle(std::vector<T>& items, testing::Draw& draw) {
  for (size_t i = items.size(); i > 1; --i)
    std::swap(items[i - 1], items[static_cast<size_t>(draw.below(static_cast<int64_t>(i)))]);
}

int64_t draw_numel(testing::Draw& draw) {
  switch (draw.below(5)) {
    case 0: return draw.below(4);
    case 1: return draw.below(300);
    case 2: return draw.below(5000);
    case 3: return draw.below(70000);
    default: return draw.below(600000);
  }
}

Call draw_call(testing::Draw& draw, int size) {
  Call call{};
  call.kind = static_cast<CollectiveKind>(draw.below(7)); // a send stands for a receive too
  call.dtype = draw.of(kDtypes);
  call.op = static_cast<ReduceOp>(draw.below(5));
  if (call.op == ReduceOp::kAvg && !at::isFloatingType(call.dtype)) call.op = ReduceOp::kMax;
  call.numel = draw_numel(draw);
  call.root = static_cast<int>(draw.below(size));
  call.peer = (call.root + 1 + static_cast<int>(draw.below(size - 1))) % size;
  call.in_place = draw.chance(50);
  call.data_seed = static_cast<uint64_t>(draw.below(1 << 30));
  if (call.kind == CollectiveKind::kAllToAll)
    for (int i = 0; i < size * size; ++i) call.counts.push_back(draw.chance(20) ? 0 : draw_numel(draw) / size);
  return call;
}

at::Tensor data_of(const Call& call, int rank, int64_t numel) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(call.data_seed * 64 + rank);
  // Over hosts sums have another order, so they have to be exact.
  if (!testing::simulated_hosts().empty() && at::isFloatingType(call.dtype))
    return torch::randint(-2, 3, {numel}, generator, torch::kLong).to(call.dtype);
  if (at::isFloatingType(call.dtype)) return torch::randn({numel}, generator, torch::kFloat).to(call.dtype);
  return torch::randint(0, call.dtype == at::kBool ? 2 : 100, {numel}, generator, torch::kLong).to(call.dtype);
}

/// A call in flight over one transport, with its result.
struct Started {
  Work work;
  at::Tensor result;
};

Started start_all_to_all(Communicator& group, const Call& call, const std::string& label) {
  const int n = group.size(), me = group.rank();
  std::vector<int64_t> sends, receives;
  for (int r = 0; r < n; ++r) {
    sends.push_back(call.counts[me * n + r]);
    receives.push_back(call.counts[r * n + me]);
  }
  const auto sum = [](const auto& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); };
  auto output = torch::zeros({sum(receives)}, call.dtype);
  return {group.all_to_all(output, data_of(call, me, sum(sends)), receives, sends, label), output};
}

Started start(Communicator& group, const Call& call, const std::string& label) {
  const int n = group.size(), me = group.rank();
  switch (call.kind) {
    case CollectiveKind::kAllGather: {
      auto output = torch::zeros({n * call.numel}, call.dtype);
      auto input = data_of(call, me, call.numel);
      if (call.in_place) input = output.narrow(0, me * call.numel, call.numel).copy_(input);
      return {group.all_gather_into(output, input, label), output};
    }
    case CollectiveKind::kReduceScatter: {
      auto output = torch::zeros({call.numel}, call.dtype);
      return {group.reduce_scatter(output, data_of(call, me, n * call.numel), call.op, label), output};
    }
    case CollectiveKind::kAllReduce: {
      auto tensor = data_of(call, me, call.numel);
      return {group.all_reduce(tensor, call.op, label), tensor};
    }
    case CollectiveKind::kAllToAll: return start_all_to_all(group, call, label);
    case CollectiveKind::kBroadcast: {
      auto tensor = data_of(call, me, call.numel);
      return {group.broadcast(tensor, call.root, label), tensor};
    }
    case CollectiveKind::kBarrier: group.barrier(label); return {};
    default: {
      auto tensor = data_of(call, me, call.numel);
      if (me == call.root) return {group.send(tensor, call.peer, label), tensor};
      if (me == call.peer) return {group.receive(tensor, call.root, label), tensor};
      return {};
    }
  }
}

/// A seed's rounds of calls on one group, over both transports.
void run_rounds(Communicator& shared, Communicator& gloo, uint32_t seed, int rounds) {
  testing::Draw draw(seed), own(seed * 31 + static_cast<uint32_t>(shared.rank())); // `own` differs from rank to rank
  for (int round = 0; round < rounds; ++round) {
    const int count = 1 + static_cast<int>(draw.below(12));
    std::vector<Call> calls;
    std::vector<Started> ours, theirs;
    for (int i = 0; i < count; ++i) {
      calls.push_back(draw_call(draw, shared.size()));
      const auto label = c10::str("call ", round, ".", i);
      ours.push_back(start(shared, calls.back(), label));
      theirs.push_back(start(gloo, calls.back(), label));
    }
    std::vector<int> order(count);
    std::iota(order.begin(), order.end(), 0);
    shuffle(order, own);
    for (const int i : order) {
      if (own.chance(10)) ours[i].work.is_completed();
      ours[i].work.wait();
      theirs[i].work.wait();
    }
    for (int i = 0; i < count; ++i) {
      SCOPED_TRACE(c10::str("seed ", seed, " round ", round, " call ", i, ": ", to_string(calls[i].kind), " of ", calls[i].numel,
                            " ", calls[i].dtype));
      if (ours[i].result.defined()) EXPECT_TENSORS_EQUAL(ours[i].result, theirs[i].result);
    }
  }
}

/// Groups of the drawn ranks, in any order, each in a thread of its own.
void run_seed(const Groups& groups, uint32_t seed) {
  auto& context = process_context();
  testing::Draw draw(seed);
  std::vector<std::thread> threads;
  const int count = 1 + static_cast<int>(draw.below(3));
  for (int i = 0; i < count; ++i) {
    std::vector<int64_t> ranks(context.world_size());
    std::iota(ranks.begin(), ranks.end(), 0);
    shuffle(ranks, draw);
    ranks.resize(static_cast<size_t>(std::max<int64_t>(2, 1 + draw.below(context.world_size()))));
    const auto group_seed = static_cast<uint32_t>(draw.below(1 << 20));
    if (std::find(ranks.begin(), ranks.end(), context.rank()) == ranks.end()) continue;
    const auto name = c10::str(seed, "/", i);
    auto shared = groups.make(ranks, Transport::kSharedMemory, name), gloo = groups.make(ranks, Transport::kGloo, name);
    threads.emplace_back([shared, gloo, group_seed] { run_rounds(*shared, *gloo, group_seed, testing::full_run() ? 30 : 8); });
  }
  for (auto& thread : threads) thread.join();
}

TEST(Transports, RandomCallsGiveTheSameOverSharedMemoryAsOverGloo) {
  if (process_context().world_size() == 1) return;
  const Groups groups;
  std::vector<uint32_t> seeds(200);
  std::iota(seeds.begin(), seeds.end(), 1);
  for (const auto seed : testing::sweep(seeds, 2)) run_seed(groups, seed);
}

} // namespace
} // namespace tessera::transports_test
