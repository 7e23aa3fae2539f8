#include <tessera/collectives/backends/shared_memory/connect.h>

#include <tessera/base/error_text.h>
#include <tessera/collectives/backends/shared_memory/shared_memory_communicator.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <sched.h>
#include <unistd.h>
#include <sstream>
#include <thread>
#include <utility>

namespace tessera::internal::shared_memory {

namespace {

// What a rank says that has the segment, and all arenas; other words are a refusal.
constexpr const char *kOpened = "segment", *kOpenedAll = "segment and arenas";
constexpr std::chrono::microseconds kBackgroundDelay(500);

std::string offer_key(int64_t rank) { return c10::str("offer/", rank); }
std::string opened_key(int64_t rank) { return c10::str("opened/", rank); }

int cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency());
}

/// The values of all ranks of the group under keys that each of them sets, once all have.
std::vector<std::string> of_all(const GroupDescription& group, std::string (*key_of)(int64_t), const std::string& own) {
  group.store->set(key_of(group.rank), own);
  std::vector<std::string> keys, values;
  for (size_t rank = 0; rank < group.ranks.size(); ++rank) keys.push_back(key_of(static_cast<int64_t>(rank)));
  for (const auto& value : group.store->multiGet(keys)) values.emplace_back(value.begin(), value.end());
  return values;
}

/// What a rank has for the others, as numbers in a line.
struct Offer {
  int64_t process = 0;
  int64_t arena = -1, arena_bytes = 0; ///< its descriptor there
  int64_t segment = -1;                ///< of the first rank alone, with its shape
  int64_t inline_bytes = 0, chunk_bytes = 0, pair_inline_bytes = 0, pair_chunk_bytes = 0;
  int64_t signature_bytes = static_cast<int64_t>(sizeof(Signature)); ///< differs between builds

  std::string encode() const {
    return c10::str(signature_bytes, " ", process, " ", arena, " ", arena_bytes, " ", segment, " ", inline_bytes, " ",
                    chunk_bytes, " ", pair_inline_bytes, " ", pair_chunk_bytes);
  }
  static Offer decode(const std::string& text) {
    Offer offer;
    std::istringstream numbers(text);
    for (auto* number : {&offer.signature_bytes, &offer.process, &offer.arena, &offer.arena_bytes, &offer.segment,
                         &offer.inline_bytes, &offer.chunk_bytes, &offer.pair_inline_bytes, &offer.pair_chunk_bytes})
      numbers >> *number;
    TORCH_CHECK(!numbers.fail() && offer.signature_bytes == static_cast<int64_t>(sizeof(Signature)),
                "another build of the library offers ", text);
    return offer;
  }
};

/// One attempt of this rank.
struct Attempt {
  Segment segment;
  GroupShape shape;
  std::vector<char*> arenas; ///< empty where not all can be had
  std::string refusal;       ///< why this rank has no segment
};

void check_sees_ends(const GroupDescription& group) {
  for (const auto rank : group.ranks)
    TORCH_CHECK(group.watch->sees_end_of(rank), "the end of the process of rank ", rank, " cannot be seen (pidfd_open)");
}

Offer make_offer(const GroupDescription& group, Attempt& attempt) {
  Offer offer;
  offer.process = getpid();
  if (const auto arena = group.arenas->own(group.watch->processes_here())) {
    offer.arena = arena->segment().descriptor();
    offer.arena_bytes = arena->segment().bytes();
  }
  if (group.rank != 0) return offer;
  const auto& shape = attempt.shape =
      GroupShape::of(static_cast<int>(group.ranks.size()), group.watch->processes_here() > cores());
  try {
    attempt.segment = Segment::create(shape.bytes(), shape.reserved_bytes());
    offer.segment = attempt.segment.descriptor();
  } catch (const c10::Error& error) {
    attempt.refusal = error_text(error);
  }
  offer.inline_bytes = shape.all.inline_bytes;
  offer.chunk_bytes = shape.all.chunk_bytes;
  offer.pair_inline_bytes = shape.pair.inline_bytes;
  offer.pair_chunk_bytes = shape.pair.chunk_bytes;
  return offer;
}

void open_segment(const GroupDescription& group, const Offer& first, Attempt& attempt) {
  if (group.rank == 0) return;
  TORCH_CHECK(first.segment >= 0, "the first rank made no segment");
  TORCH_CHECK(group.watch->process_here(group.ranks[0]) == first.process, "process ", first.process, " is not that of rank ",
              group.ranks[0]);
  const int ranks = static_cast<int>(group.ranks.size());
  attempt.shape = {
      ranks, {ranks, first.inline_bytes, first.chunk_bytes}, {2, first.pair_inline_bytes, first.pair_chunk_bytes, 1}};
  attempt.segment = Segment::open(static_cast<pid_t>(first.process), static_cast<int>(first.segment), attempt.shape.bytes());
}

std::vector<char*> open_arenas(const GroupDescription& group, const std::vector<Offer>& offers) try {
  std::vector<char*> arenas;
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    const auto& offer = offers[rank];
    if (offer.arena < 0) return {};
    arenas.push_back(static_cast<int>(rank) == group.rank
                         ? group.arenas->own(0)->segment().data()
                         : group.arenas->open(group.ranks[rank], static_cast<pid_t>(offer.process), static_cast<int>(offer.arena),
                                              offer.arena_bytes));
  }
  return arenas;
} catch (const c10::Error&) { // data go through the lanes then
  return {};
}

EngineOptions options_of(const GroupDescription& group) {
  EngineOptions options;
  options.group = c10::str("of group ", group.name, " [", c10::Join(", ", group.ranks), "] on rank ", group.ranks[group.rank]);
  options.ranks = group.ranks;
  options.rank = group.rank;
  options.timeout = group.options.timeout;
  options.watch = group.watch;
  options.departures = group.departures();
  options.background_delay = kBackgroundDelay;
  options.spin = group.options.spin;
  options.shares_cores = group.watch->processes_here() > cores();
  return options;
}

} // namespace

bool can_reach_each_other(const GroupDescription& group) {
  for (const auto rank : group.ranks)
    if (!group.watch->process_here(rank)) return false;
  return true;
}

Connection connect(const GroupDescription& group) {
  Attempt attempt;
  const auto texts = of_all(group, offer_key, make_offer(group, attempt).encode());
  try {
    std::vector<Offer> offers;
    for (const auto& text : texts) offers.push_back(Offer::decode(text));
    check_sees_ends(group);
    open_segment(group, offers[0], attempt);
    attempt.arenas = open_arenas(group, offers);
  } catch (const c10::Error& error) {
    if (attempt.refusal.empty()) attempt.refusal = error_text(error);
  }
  const auto opened = of_all(group, opened_key,
                             !attempt.refusal.empty() ? attempt.refusal
                             : attempt.arenas.empty() ? kOpened
                                                      : kOpenedAll);
  bool has_arenas = true;
  for (size_t rank = 0; rank < opened.size(); ++rank) {
    has_arenas = has_arenas && opened[rank] == kOpenedAll;
    if (opened[rank] != kOpened && opened[rank] != kOpenedAll)
      return {nullptr, nullptr, c10::str("rank ", group.ranks[rank], ": ", opened[rank])};
  }
  auto options = options_of(group);
  if (has_arenas) {
    options.arenas = std::move(attempt.arenas);
    options.memory = group.arenas;
  }
  auto engine = Engine::make(GroupMemory(std::move(attempt.segment), attempt.shape), std::move(options));
  return {std::move(engine), has_arenas ? group.arenas->own(0) : nullptr, ""};
}

CommunicatorPtr Connection::communicator(const GroupDescription& group) const {
  return std::make_shared<SharedMemoryCommunicator>(group.name, group.ranks, group.rank, engine, arena);
}

} // namespace tessera::internal::shared_memory
