#include <tessera/collectives/gloo/gloo_communicator.h>

#include <tessera/collectives/checks.h>
#include <tessera/collectives/combined_work.h>
#include <tessera/collectives/gloo/exchange.h>
#include <tessera/collectives/reduce.h>

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

struct GlooCommunicator::Call {
  CollectiveKind kind;
  std::string_view label;
  at::ScalarType dtype = at::kByte;
  int64_t bytes = 0; // of the full buffer
  ReduceOp op = ReduceOp::kSum;
  int root = -1;
};

GlooCommunicator::GlooCommunicator(std::string name, RankList ranks, int rank, std::shared_ptr<Channel> channel)
    : Communicator(std::move(name), std::move(ranks), rank, at::kCPU), channel_(std::move(channel)) {}

GlooCommunicator::~GlooCommunicator() { channel_->close(); }

std::shared_ptr<Exchange> GlooCommunicator::start(const Call& call, ExchangePlan plan) {
  auto exchange = std::make_shared<Exchange>(channel_, describe(*this, call.kind, call.label));
  exchange->start(make_signature(call.kind, call.label, call.dtype, call.bytes, call.op, call.root), std::move(plan));
  return exchange;
}

Work GlooCommunicator::finish_call(const Call& call, std::vector<std::shared_ptr<Exchange>> exchanges) {
  counters_.add(call.kind, call.bytes);
  std::vector<Work> works;
  for (auto& exchange : exchanges) works.emplace_back(std::make_shared<ExchangeWork>(channel_, std::move(exchange)));
  auto work = works.size() == 1 ? works[0] : combine(std::move(works));
  return coalesced_.note(std::move(work));
}

Work GlooCommunicator::run(const Call& call, ExchangePlan plan) { return finish_call(call, {start(call, std::move(plan))}); }

Work GlooCommunicator::all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) {
  check_all_gather(*this, output, input, label);
  const auto count = static_cast<int64_t>(input.nbytes());
  ExchangePlan plan(size());
  for (int r = 0; r < size(); ++r) {
    plan.send[r] = {input.data_ptr(), count};
    plan.receive[r] = {bytes_at(output, r * input.numel()), count};
  }
  copy_bytes(plan.receive[rank()].data, input.data_ptr(), count);
  plan.finish = [output, input] {};
  return run({CollectiveKind::kAllGather, label, input.scalar_type(), static_cast<int64_t>(output.nbytes())}, std::move(plan));
}

// Completes `plan`, which sends parts of `input`: what comes is reduced with this rank's own part, into `output`. There the first
// part is received already, unless `output` lies in what is being sent: so two ranks need no more memory.
void GlooCommunicator::reduce_into(const at::Tensor& output, const at::Tensor& input, ReduceOp op, ExchangePlan& plan) {
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

Work GlooCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) {
  check_reduce_scatter(*this, output, input, op, label);
  ExchangePlan plan(size());
  for (int r = 0; r < size(); ++r) plan.send[r] = {bytes_at(input, r * output.numel()), static_cast<int64_t>(output.nbytes())};
  reduce_into(output, input, op, plan);
  return run({CollectiveKind::kReduceScatter, label, input.scalar_type(), static_cast<int64_t>(input.nbytes()), op},
             std::move(plan));
}

Work GlooCommunicator::all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) {
  check_all_reduce(*this, tensor, op, label);
  const Call call{CollectiveKind::kAllReduce, label, tensor.scalar_type(), static_cast<int64_t>(tensor.nbytes()), op};
  if (call.bytes > one_round_bytes(size())) return all_reduce_in_two_rounds(call, tensor, op);
  ExchangePlan plan(size());
  absl::c_fill(plan.send, Bytes{tensor.data_ptr(), call.bytes});
  reduce_into(tensor, tensor, op, plan);
  return run(call, std::move(plan));
}

Work GlooCommunicator::all_reduce_in_two_rounds(const Call& call, const at::Tensor& tensor, ReduceOp op) {
  // While one segment is reduced, the next one is on the wire.
  const auto flat = tensor.view({-1});
  const auto segments = static_cast<int>((call.bytes + kSegmentBytes - 1) / kSegmentBytes);
  std::vector<std::shared_ptr<Exchange>> exchanges;
  for (int i = 0; i < segments; ++i) {
    const auto range = part(flat.numel(), segments, i);
    exchanges.push_back(all_reduce_segment(call, flat.narrow(0, range.begin, range.count), op));
  }
  return finish_call(call, std::move(exchanges));
}

std::shared_ptr<Exchange> GlooCommunicator::all_reduce_segment(const Call& call, const at::Tensor& tensor, ReduceOp op) {
  const auto width = static_cast<int64_t>(tensor.element_size());
  const auto own = part(tensor.numel(), size(), rank());
  ExchangePlan scatter(size()), gather(size());
  for (int r = 0; r < size(); ++r) {
    const auto range = part(tensor.numel(), size(), r);
    scatter.send[r] = gather.receive[r] = {bytes_at(tensor, range.begin), range.count * width};
    gather.send[r] = {bytes_at(tensor, own.begin), own.count * width};
  }
  reduce_into(tensor.narrow(0, own.begin, own.count), tensor, op, scatter);
  scatter.second_round = std::make_unique<ExchangePlan>(std::move(gather));
  auto exchange = start(call, std::move(scatter));
  channel_->complete_in_background(exchange); // the second round must not wait for this rank's `wait`
  return exchange;
}

Work GlooCommunicator::all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                                  const std::vector<int64_t>& input_splits, std::string_view label) {
  const auto splits = check_all_to_all(*this, output, input, output_splits, input_splits, label);
  const auto width = static_cast<int64_t>(input.element_size());
  const auto own = splits.input[rank()];
  // Compared signatures make it an error on every rank.
  TORCH_CHECK(own == splits.output[rank()] || channel_->options().check_signatures,
              describe(*this, CollectiveKind::kAllToAll, label), ": rank ", ranks()[rank()], " sends itself ", own,
              " elements and expects ", splits.output[rank()]);
  ExchangePlan plan(size());
  plan.counts = splits.byte_counts(width);
  int64_t sent = 0, received = 0;
  for (int r = 0; r < size(); ++r) {
    plan.send[r] = {bytes_at(input, sent), splits.input[r] * width};
    plan.receive[r] = {bytes_at(output, received), splits.output[r] * width};
    sent += splits.input[r];
    received += splits.output[r];
  }
  if (own == splits.output[rank()]) copy_bytes(plan.receive[rank()].data, plan.send[rank()].data, own * width);
  plan.finish = [output, input] {};
  const auto bytes = static_cast<int64_t>(std::max(output.nbytes(), input.nbytes()));
  return run({CollectiveKind::kAllToAll, label, input.scalar_type(), bytes}, std::move(plan));
}

Work GlooCommunicator::broadcast(const at::Tensor& tensor, int root, std::string_view label) {
  check_broadcast(*this, tensor, root, label);
  const Bytes whole{tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes())};
  ExchangePlan plan(size());
  if (rank() == root)
    absl::c_fill(plan.send, whole);
  else
    plan.receive[root] = whole;
  plan.finish = [tensor] {};
  return run({CollectiveKind::kBroadcast, label, tensor.scalar_type(), whole.count, ReduceOp::kSum, root}, std::move(plan));
}

Work GlooCommunicator::send(const at::Tensor& tensor, int to, std::string_view label) {
  check_send(*this, tensor, to, label);
  return run_between(CollectiveKind::kSend, {rank(), to}, tensor, label);
}

Work GlooCommunicator::receive(const at::Tensor& tensor, int from, std::string_view label) {
  check_receive(*this, tensor, from, label);
  return run_between(CollectiveKind::kReceive, {from, rank()}, tensor, label);
}

Work GlooCommunicator::run_between(CollectiveKind kind, Direction direction, const at::Tensor& tensor, std::string_view label) {
  const Bytes whole{tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes())};
  ExchangePlan plan(size());
  plan.direction = direction;
  if (kind == CollectiveKind::kSend)
    plan.send[direction.to] = whole;
  else
    plan.receive[direction.from] = whole;
  plan.finish = [tensor] {};
  return run({kind, label, tensor.scalar_type(), whole.count}, std::move(plan));
}

void GlooCommunicator::give_up(std::string_view cause) {
  if (channel_->options().check_signatures) return Communicator::give_up(cause);
  channel_->disconnect(std::string(cause));
}

Work GlooCommunicator::coalesced(const std::function<void()>& issue) { return coalesced_.run(issue, name()); }

void GlooCommunicator::barrier(std::string_view label) { run({CollectiveKind::kBarrier, label}, ExchangePlan(size())).wait(); }

} // namespace tessera::internal::gloo
