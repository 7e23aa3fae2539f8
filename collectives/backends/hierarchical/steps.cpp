#include <tessera/collectives/backends/hierarchical/steps.h>

#include <tessera/collectives/sums/reduce.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera::internal::hierarchical {

namespace {

using gloo::ExchangePlan;
using shared_memory::Motion, shared_memory::Part;

constexpr int64_t kChunkBytes = 512 << 10; // a multiple of every element's size
constexpr int64_t kWindow = 8;             // chunks between the hosts at once

using ExchangePtr = std::shared_ptr<gloo::Exchange>;

/// The `index`-th chunk of `bytes`.
struct Range {
  int64_t begin, count;
};
Range chunk_of(int64_t bytes, int64_t unit, int64_t index) { return {index * unit, std::min(unit, bytes - index * unit)}; }
int64_t chunks_of(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit; }

/// `begin(i)` starts an exchange between hosts and `end(i, exchange)` completes it, `kWindow` chunks later.
template <typename Begin, typename End>
void pipeline(int64_t chunks, const Begin& begin, const End& end) {
  std::vector<ExchangePtr> window(kWindow);
  for (int64_t i = 0; i < chunks + kWindow; ++i) {
    auto& exchange = window[i % kWindow];
    if (i >= kWindow && i - kWindow < chunks) end(i - kWindow, exchange);
    if (i < chunks) exchange = begin(i);
  }
}

template <typename Function>
void for_each_other_host(const HostLayout& layout, const Function& function) {
  for (int step = 1; step < layout.hosts(); ++step) function((layout.host + step) % layout.hosts());
}

/// What all ranks of a host show each other of `largest` bytes. This one shows `input`, or nothing.
Motion copies(Part input, int64_t largest, int columns) {
  Motion motion;
  motion.kind = Motion::Kind::kCopies;
  motion.input = input;
  motion.largest_input = largest;
  motion.receive.resize(columns);
  return motion;
}

/// Reduces `parts` of `input`, one for each rank of the host, this rank's to `output`.
Motion reduction_of(Part input, shared_memory::Parts parts, char* output, Reduction reduction) {
  Motion motion;
  motion.kind = Motion::Kind::kReduceScatter;
  motion.input = input;
  motion.largest_input = input.count;
  motion.output = {output, parts[0].count};
  motion.send = std::move(parts);
  motion.dtype = reduction.dtype;
  motion.op = reduction.op;
  return motion;
}

int64_t elements(int64_t bytes, Reduction reduction) { return bytes / static_cast<int64_t>(c10::elementSize(reduction.dtype)); }

} // namespace

const std::shared_ptr<c10::DataPtr>& Staging::memory(int64_t bytes) {
  if (bytes_ >= bytes) return memory_;
  auto memory = arena_ ? arena_->allocate(bytes) : c10::DataPtr();
  if (!memory) memory = c10::GetAllocator(c10::kCPU)->allocate(static_cast<size_t>(bytes));
  memory_ = std::make_shared<c10::DataPtr>(std::move(memory));
  bytes_ = bytes;
  return memory_;
}

namespace {

/// The output of an all-gather, as a rank of `layout` fills it.
struct Gathered {
  const HostLayout& layout;
  char* output;
  int64_t bytes; ///< of each rank

  Part part(int host, int column, const Range& range) const {
    return {output + layout.places[host][column] * bytes + range.begin, range.count};
  }
  /// Each rank of this host holds one piece of `host`'s data (`own` is this one's); exchanges the pieces inside the host.
  void share_inside(Call& call, Part own, int host, const Range& range) const {
    auto motion = copies(own, range.count, layout.columns());
    for (int column = 0; column < layout.columns(); ++column) motion.receive[column] = part(host, column, range);
    if (own.data == motion.receive[layout.column].data) motion.receive[layout.column] = {};
    call.within(std::move(motion));
  }
};

} // namespace

// NOLINTNEXTLINE(readability-non-const-parameter): written through `gathered`
void all_gather(Call& call, char* output, char* input, int64_t bytes) {
  const auto& layout = call.links().layout;
  const Gathered gathered{layout, output, bytes};
  const auto begin = [&](int64_t index) {
    const auto range = chunk_of(bytes, kChunkBytes, index);
    ExchangePlan plan(layout.hosts());
    for_each_other_host(layout, [&](int host) {
      const auto part = gathered.part(host, layout.column, range);
      plan.send[host] = {input + range.begin, range.count};
      plan.receive[host] = {part.data, part.count};
    });
    return call.across(std::move(plan));
  };
  pipeline(chunks_of(bytes, kChunkBytes), begin, [&](int64_t index, const ExchangePtr& exchange) {
    call.agree();
    if (index == 0) gathered.share_inside(call, {input, bytes}, layout.host, {0, bytes});
    call.complete(exchange);
    const auto range = chunk_of(bytes, kChunkBytes, index);
    for_each_other_host(layout,
                        [&](int host) { gathered.share_inside(call, gathered.part(host, layout.column, range), host, range); });
  });
}

namespace {

/// What a chunk of a reduction needs: this host's result for each host, and what the others have sent of theirs.
class Slots {
 public:
  Slots(Staging& staging, int hosts, int64_t unit)
      : hosts_(hosts), unit_(unit), memory_(staging.memory(kWindow * 2 * hosts * unit)) {}

  char* own(int64_t index, int host) const { return at(index, host); }
  char* received(int64_t index, int host) const { return at(index, hosts_ + host); }
  const std::shared_ptr<c10::DataPtr>& memory() const { return memory_; }
  /// What is reduced, in the order of the hosts.
  std::vector<const void*> terms(int64_t index, int own_host, const void* own) const {
    std::vector<const void*> all;
    for (int host = 0; host < hosts_; ++host) all.push_back(host == own_host ? own : received(index, host));
    return all;
  }

 private:
  char* at(int64_t index, int place) const {
    return static_cast<char*>(memory_->get()) + ((index % kWindow) * 2 * hosts_ + place) * unit_;
  }

  int hosts_;
  int64_t unit_;
  std::shared_ptr<c10::DataPtr> memory_;
};

} // namespace

void reduce_scatter(Call& call, Staging& staging, char* output, char* input, int64_t bytes, Reduction reduction) {
  const auto& layout = call.links().layout;
  const Part whole{input, bytes * layout.hosts() * layout.columns()};
  const Slots slots(staging, layout.hosts(), std::min(bytes, kChunkBytes));
  const auto reduce_inside = [&](int64_t index, int host) {
    const auto range = chunk_of(bytes, kChunkBytes, index);
    shared_memory::Parts parts;
    for (const int place : layout.places[host]) parts.push_back({input + place * bytes + range.begin, range.count});
    call.within(reduction_of(whole, std::move(parts), slots.own(index, host), reduction));
  };
  const auto begin = [&](int64_t index) {
    const auto count = chunk_of(bytes, kChunkBytes, index).count;
    ExchangePlan plan(layout.hosts());
    for_each_other_host(layout, [&](int host) {
      reduce_inside(index, host);
      plan.send[host] = {slots.own(index, host), count};
      plan.receive[host] = {slots.received(index, host), count};
    });
    plan.finish = [memory = slots.memory()] {};
    return call.across(std::move(plan));
  };
  pipeline(chunks_of(bytes, kChunkBytes), begin, [&](int64_t index, const ExchangePtr& exchange) {
    call.agree();
    reduce_inside(index, layout.host);
    call.complete(exchange);
    const auto range = chunk_of(bytes, kChunkBytes, index);
    const auto terms = slots.terms(index, layout.host, slots.own(index, layout.host));
    reduce(output + range.begin, terms, elements(range.count, reduction), reduction.dtype, reduction.op);
  });
}

namespace {

/// Reduces `part` of this host with those of the others, in place: everybody sends all to everybody, or, where that is more, a
/// part to each and then the result of one to all.
ExchangePlan reduce_across(const HostLayout& layout, const Slots& slots, int64_t index, Part part, Reduction reduction) {
  const bool in_one_round = layout.hosts() == 2;
  const auto width = static_cast<int64_t>(c10::elementSize(reduction.dtype));
  const auto share = in_one_round ? part.count : (part.count / width + layout.hosts() - 1) / layout.hosts() * width;
  const auto share_of = [&](int host) -> Part {
    const auto begin = in_one_round ? 0 : std::min(host * share, part.count);
    return {part.data + begin, std::min(share, part.count - begin)};
  };
  const auto own = share_of(layout.host);
  const auto terms = slots.terms(index, layout.host, own.data);

  ExchangePlan plan(layout.hosts());
  auto gather = in_one_round ? nullptr : std::make_unique<ExchangePlan>(layout.hosts());
  for_each_other_host(layout, [&](int host) {
    plan.send[host] = {share_of(host).data, share_of(host).count};
    plan.receive[host] = {slots.received(index, host), own.count};
    if (!gather) return;
    gather->send[host] = {own.data, own.count};
    gather->receive[host] = plan.send[host];
  });
  plan.second_round = std::move(gather);
  plan.finish = [memory = slots.memory(), own, terms, reduction] {
    if (own.count > 0) reduce(own.data, terms, elements(own.count, reduction), reduction.dtype, reduction.op);
  };
  return plan;
}

} // namespace

void all_reduce(Call& call, Staging& staging, char* data, int64_t bytes, Reduction reduction) {
  const auto& layout = call.links().layout;
  const int64_t columns = layout.columns();
  const auto width = static_cast<int64_t>(c10::elementSize(reduction.dtype));
  const auto unit = columns * kChunkBytes;
  // Parts are equally long; the last ones overlap where they do not divide the chunk.
  const auto parts_of = [&](int64_t index) {
    const auto range = chunk_of(bytes, unit, index);
    const auto count = (range.count / width + columns - 1) / columns * width;
    shared_memory::Parts parts;
    for (int64_t column = 0; column < columns; ++column)
      parts.push_back({data + range.begin + std::min(column * count, range.count - count), count});
    return parts;
  };
  const Slots slots(staging, layout.hosts(), parts_of(0)[0].count);
  const auto begin = [&](int64_t index) {
    auto parts = parts_of(index);
    const Part own{slots.own(index, layout.host), parts[0].count};
    call.within(reduction_of({data, bytes}, std::move(parts), own.data, reduction));
    return call.across(reduce_across(layout, slots, index, own, reduction));
  };
  pipeline(chunks_of(bytes, unit), begin, [&](int64_t index, const ExchangePtr& exchange) {
    call.agree();
    call.complete(exchange);
    auto parts = parts_of(index);
    auto motion = copies({slots.own(index, layout.host), parts[0].count}, parts[0].count, layout.columns());
    motion.receive = std::move(parts);
    call.within(std::move(motion));
  });
}

void broadcast(Call& call, char* data, int64_t bytes, int root) {
  const auto& layout = call.links().layout;
  const auto [root_host, root_column] = layout.find(root);
  const auto begin = [&, root_host = root_host, root_column = root_column](int64_t index) -> ExchangePtr {
    if (layout.column != root_column) return nullptr;
    const auto range = chunk_of(bytes, kChunkBytes, index);
    ExchangePlan plan(layout.hosts());
    if (layout.host == root_host)
      for_each_other_host(layout, [&](int host) { plan.send[host] = {data + range.begin, range.count}; });
    else
      plan.receive[root_host] = {data + range.begin, range.count};
    return call.across(std::move(plan));
  };
  call.agree();
  pipeline(chunks_of(bytes, kChunkBytes), begin, [&, root_column = root_column](int64_t index, const ExchangePtr& exchange) {
    if (exchange) call.complete(exchange);
    const auto range = chunk_of(bytes, kChunkBytes, index);
    const Part chunk{data + range.begin, range.count};
    auto motion = copies(exchange ? chunk : Part(), range.count, layout.columns());
    if (!exchange) motion.receive[root_column] = chunk;
    call.within(std::move(motion));
  });
}

} // namespace tessera::internal::hierarchical
