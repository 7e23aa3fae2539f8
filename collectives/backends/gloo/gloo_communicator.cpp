#include <tessera/collectives/backends/gloo/gloo_communicator.h>

#include <tessera/collectives/backends/gloo/exchange.h>
#include <tessera/collectives/calls/checks.h>
#include <tessera/collectives/calls/combined_work.h>
#include <tessera/collectives/sums/reduce.h>

#include <absl/algorithm/container.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace tessera::internal::gloo {

namespace {

// Up to this size (bytes) one round that sends everything to everybody is faster than two rounds that send parts.
int64_t one_round_bytes(int ranks) { return ranks == 2 ? 4 << 20 : 64 << 10; }

// The all-reduce in two rounds moves its tensor in segments of about this size.
constexpr int64_t kSegmentBytes = 8 << 20;

char* bytes_at(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

Bytes all_of(const at::Tensor& tensor) { return {tensor.data_ptr(), bytes_of(tensor)}; }

// The `index`-th of `parts` ranges that cover `numel` elements and differ by one element at most.
struct Range {
  int64_t begin, count;
};
Range part(int64_t numel, int parts, int index) {
  const auto base = numel / parts, larger = numel % parts;
  return {index * base + std::min<int64_t>(index, larger), base + (index < larger ? 1 : 0)};
}

void copy_bytes(void* to, const void* from, int64_t count) {
  if (count > 0 && to != from) std::memcpy(to, from, count);
}

} // namespace

GlooCommunicator::GlooCommunicator(std::string name, RankList ranks, int rank, std::shared_ptr<Channel> channel)
    : CheckedCommunicator(std::move(name), std::move(ranks), rank, at::kCPU), channel_(std::move(channel)) {}

GlooCommunicator::~GlooCommunicator() { channel_->close(); }

Work GlooCommunicator::start(CollectiveCall&& call) {
  if (call.kind == CollectiveKind::kAllReduce && call.bytes() > one_round_bytes(size())) return all_reduce_in_two_rounds(call);
  return Work(std::make_shared<ExchangeWork>(channel_, exchange(call, plan(call))));
}

std::shared_ptr<Exchange> GlooCommunicator::exchange(const CollectiveCall& call, ExchangePlan plan) const {
  auto exchange = std::make_shared<Exchange>(channel_, describe(*this, call));
  exchange->start(call.signature(), std::move(plan));
  return exchange;
}

ExchangePlan GlooCommunicator::plan(const CollectiveCall& call) const {
  const auto &output = call.output, &input = call.input;
  ExchangePlan plan(size());
  switch (call.kind) {
    case CollectiveKind::kAllGather: plan_all_gather(call, plan); break;
    case CollectiveKind::kReduceScatter:
      for (int r = 0; r < size(); ++r) plan.send[r] = {bytes_at(input, r * output.numel()), bytes_of(output)};
      reduce_into(output, input, call.op, plan);
      break;
    case CollectiveKind::kAllReduce:
      absl::c_fill(plan.send, all_of(output));
      reduce_into(output, output, call.op, plan);
      break;
    case CollectiveKind::kAllToAll: plan_all_to_all(call, plan); break;
    case CollectiveKind::kBroadcast: plan_broadcast(call, plan); break;
    case CollectiveKind::kSend:
      plan.direction = {rank(), call.peer};
      plan.send[call.peer] = all_of(input);
      break;
    case CollectiveKind::kReceive:
      plan.direction = {call.peer, rank()};
      plan.receive[call.peer] = all_of(output);
      break;
    case CollectiveKind::kBarrier: break;
  }
  if (!plan.finish) plan.finish = [output, input] {}; // until then they live
  return plan;
}

void GlooCommunicator::plan_all_gather(const CollectiveCall& call, ExchangePlan& plan) const {
  const auto own = all_of(call.input);
  for (int r = 0; r < size(); ++r) {
    plan.send[r] = own;
    plan.receive[r] = {bytes_at(call.output, r * call.input.numel()), own.count};
  }
  copy_bytes(plan.receive[rank()].data, own.data, own.count);
}

void GlooCommunicator::plan_all_to_all(const CollectiveCall& call, ExchangePlan& plan) const {
  const auto& [received_counts, sent_counts] = call.splits;
  const auto width = static_cast<int64_t>(call.input.element_size());
  const auto own = sent_counts[rank()];
  // Compared signatures make it an error on every rank.
  TORCH_CHECK(own == received_counts[rank()] || channel_->options().check_signatures, describe(*this, call), ": rank ",
              ranks()[rank()], " sends itself ", own, " elements and expects ", received_counts[rank()]);
  plan.counts = call.splits.byte_counts(width);
  int64_t sent = 0, received = 0;
  for (int r = 0; r < size(); ++r) {
    plan.send[r] = {bytes_at(call.input, sent), sent_counts[r] * width};
    plan.receive[r] = {bytes_at(call.output, received), received_counts[r] * width};
    sent += sent_counts[r];
    received += received_counts[r];
  }
  if (own == received_counts[rank()]) copy_bytes(plan.receive[rank()].data, plan.send[rank()].data, own * width);
}

void GlooCommunicator::plan_broadcast(const CollectiveCall& call, ExchangePlan& plan) const {
  if (rank() == call.peer)
    absl::c_fill(plan.send, all_of(call.output));
  else
    plan.receive[call.peer] = all_of(call.output);
}

// Completes `plan`, which sends parts of `input`: what comes is reduced with this rank's own part, into `output`. There the first
// part is received already, unless `output` lies in what is being sent: so two ranks need no more memory.
void GlooCommunicator::reduce_into(const at::Tensor& output, const at::Tensor& input, ReduceOp op, ExchangePlan& plan) const {
  const auto count = static_cast<int64_t>(output.nbytes());
  bool is_free = !overlap(output, input);
  const int parts = size() - (is_free ? 2 : 1);
  at::Tensor buffer;
  if (parts * count > 0) buffer = channel_->take_buffer(parts * count);
  std::vector<const void*> terms(size());
  for (int r = 0, next = 0; r < size(); ++r) {
    if (r == rank()) {
      terms[r] = plan.send[r].data;
      continue;
    }
    auto* place = std::exchange(is_free, false) || !buffer.defined() ? output.data_ptr() : bytes_at(buffer, next++ * count);
    plan.receive[r] = {place, count};
    terms[r] = place;
  }
  plan.finish = [output, input, buffer, terms, op, channel = channel_] {
    reduce(output.data_ptr(), terms, output.numel(), output.scalar_type(), op);
    if (buffer.defined()) channel->return_buffer(buffer);
  };
}

Work GlooCommunicator::all_reduce_in_two_rounds(const CollectiveCall& call) const {
  // While one segment is reduced, the next one is on the wire.
  const auto flat = call.output.view({-1});
  const auto segments = static_cast<int>((call.bytes() + kSegmentBytes - 1) / kSegmentBytes);
  std::vector<Work> works;
  for (int i = 0; i < segments; ++i) {
    const auto range = part(flat.numel(), segments, i);
    auto segment = all_reduce_segment(call, flat.narrow(0, range.begin, range.count));
    works.emplace_back(std::make_shared<ExchangeWork>(channel_, std::move(segment)));
  }
  return works.size() == 1 ? works[0] : combine(std::move(works));
}

std::shared_ptr<Exchange> GlooCommunicator::all_reduce_segment(const CollectiveCall& call, const at::Tensor& tensor) const {
  const auto width = static_cast<int64_t>(tensor.element_size());
  const auto own = part(tensor.numel(), size(), rank());
  ExchangePlan scatter(size()), gather(size());
  for (int r = 0; r < size(); ++r) {
    const auto range = part(tensor.numel(), size(), r);
    scatter.send[r] = gather.receive[r] = {bytes_at(tensor, range.begin), range.count * width};
    gather.send[r] = {bytes_at(tensor, own.begin), own.count * width};
  }
  reduce_into(tensor.narrow(0, own.begin, own.count), tensor, call.op, scatter);
  scatter.second_round = std::make_unique<ExchangePlan>(std::move(gather));
  auto started = exchange(call, std::move(scatter));
  channel_->complete_in_background(started); // the second round must not wait for this rank's `wait`
  return started;
}

void GlooCommunicator::give_up(std::string_view cause) {
  if (channel_->options().check_signatures) return Communicator::give_up(cause);
  channel_->disconnect(std::string(cause));
}

} // namespace tessera::internal::gloo
