#include <tessera/collectives/ranks/rendezvous.h>

#include <tessera/base/error_text.h>
#include <tessera/base/host_name.h>
#include <tessera/collectives/ranks/group_store.h>
#include <tessera/collectives/ranks/job_environment.h>
#include <tessera/collectives/ranks/rank_watch.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <sstream>

namespace tessera::internal {

namespace {

// Keys by the index of a rank.
std::string joined_key(int64_t index) { return c10::str("joined/", index); }
std::string process_key(int64_t index) { return c10::str("process/", index); }
std::string options_key(int64_t index) { return c10::str("options/", index); }
constexpr const char* kNameKey = "job";

// Machines may share a name, and containers a machine.
std::string host_identity() { return c10::str(host_name(), " ", boot_id()); }

std::string new_name() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

const char* name_of(Transport transport) {
  switch (transport) {
    case Transport::kAutomatic: return "automatic";
    case Transport::kSharedMemory: return "shared_memory";
    case Transport::kGloo: return "gloo";
  }
  return "unknown";
}

// One request, whatever the number of ranks.
std::vector<std::string> values_of(c10d::Store& store, const std::vector<int64_t>& indices, std::string (*key_of)(int64_t)) {
  std::vector<std::string> keys, values;
  for (const auto index : indices) keys.push_back(key_of(index));
  for (const auto& value : store.multiGet(keys)) values.emplace_back(value.begin(), value.end());
  return values;
}

// Encodes the options that all ranks need alike: the transport, and whether they compare what they call.
std::string encode(const ProcessGroupOptions& options) {
  const bool over_nccl = checks_collectives_over_nccl(current_environment());
  return c10::str(name_of(options.transport), " ", options.check_collectives, " ", over_nccl ? "1" : "unset-or-0");
}

// Ranks with different ones would wait for each other in vain.
void check_same(const Rendezvous& meeting, const char* what, const std::vector<std::string>& values) {
  const auto other = std::find_if(values.begin(), values.end(), [&](const auto& each) { return each != values[0]; });
  TORCH_CHECK(other == values.end(), meeting.call, ": ", what, " is ", values[0], " on rank ", meeting.ranks[0], " and ", *other,
              " on rank ", meeting.ranks[static_cast<size_t>(other - values.begin())]);
}

void check_same_options(const Rendezvous& meeting, const std::vector<std::string>& options) {
  std::vector<std::string> transports, comparisons, nccl_comparisons;
  for (const auto& each : options) {
    std::istringstream words(each);
    words >> transports.emplace_back() >> comparisons.emplace_back() >> nccl_comparisons.emplace_back();
  }
  check_same(meeting, "the transport (TESSERA_TRANSPORT, ProcessGroupOptions)", transports);
  check_same(meeting, "check_collectives (TESSERA_CHECK_COLLECTIVES, ProcessGroupOptions)", comparisons);
  check_same(meeting, "TESSERA_CHECK_COLLECTIVES (which alone counts over NCCL)", nccl_comparisons);
}

// Of two processes that come as one rank, as those of two jobs with one store, the second must not take part.
void take_place(const Rendezvous& meeting) {
  const auto own = RankWatch::own_process(), key = process_key(meeting.rank);
  auto holder = meeting.store->compareSet(key, std::string(), own);
  if (RankWatch::has_ended_here(holder)) holder = meeting.store->compareSet(key, holder, own); // it is started again
  TORCH_CHECK(holder == own, meeting.call, ": another process (", holder, ") is rank ",
              meeting.ranks[static_cast<size_t>(meeting.rank)],
              " of this job already; jobs that run at the same time need stores of their own (MASTER_PORT)");
}

// Returns why not all have come, or "".
std::string wait_for_all(const Rendezvous& meeting, const std::vector<int64_t>& indices,
                         const std::function<std::string()>& give_up) {
  std::vector<std::string> keys;
  for (const auto index : indices) keys.push_back(joined_key(index));
  try {
    wait_for_keys(
        meeting.store, keys, meeting.options.timeout, give_up ? give_up : [] { return std::string(); });
  } catch (const std::exception&) {
    if (auto why = give_up ? give_up() : ""; !why.empty()) return why;
    std::vector<int64_t> missing;
    for (const auto index : absent_from(*meeting.store, indices)) missing.push_back(meeting.ranks[static_cast<size_t>(index)]);
    if (!missing.empty())
      return c10::str("timed out after ", meeting.options.timeout.count(), " ms; of ", indices.size(),
                      " ranks these did not come: ", c10::Join(", ", missing));
  }
  return "";
}

// What the ranks have said once all have come.
struct Arrivals {
  std::string why_not; // not empty: not all have come, and there is no more
  std::vector<std::string> options;
  Places places;
};

Arrivals meet_in_store(const Rendezvous& meeting, const std::function<std::string()>& give_up) {
  auto& store = *meeting.store;
  take_place(meeting);
  if (meeting.rank == 0) store.compareSet(kNameKey, std::string(), new_name()); // a rank that comes again changes nothing
  store.set(options_key(meeting.rank), encode(meeting.options));
  store.set(joined_key(meeting.rank), host_identity());
  std::vector<int64_t> indices(meeting.ranks.size());
  std::iota(indices.begin(), indices.end(), 0);
  if (auto why_not = wait_for_all(meeting, indices, give_up); !why_not.empty()) return {.why_not = std::move(why_not)};
  return {.options = values_of(store, indices, options_key),
          .places = {values_of(store, indices, joined_key), values_of(store, indices, process_key), store.get_to_str(kNameKey)}};
}

} // namespace

std::vector<int> Places::hosts_of(const std::vector<int64_t>& indices) const {
  std::vector<int> found;
  std::map<std::string, int> numbers;
  for (const auto index : indices)
    found.push_back(numbers.emplace(hosts.at(static_cast<size_t>(index)), static_cast<int>(numbers.size())).first->second);
  return found;
}

Places meet(const Rendezvous& meeting, const std::function<std::string()>& give_up) {
  const auto fail = [&](const auto&... problem) {
    C10_THROW_ERROR(DistNetworkError,
                    c10::str(meeting.call, " on rank ", meeting.ranks[static_cast<size_t>(meeting.rank)], problem...));
  };
  Arrivals met;
  try {
    met = meet_in_store(meeting, give_up);
  } catch (const c10::DistError& error) { // of the connection to the store
    fail(" of ", meeting.ranks.size(), ": lost ", meeting.store_name, ": ", error_text(error),
         ". See why the process that hosts it has ended");
  }
  if (!met.why_not.empty()) fail(": ", met.why_not);
  check_same_options(meeting, met.options);
  return std::move(met.places);
}

std::vector<int64_t> absent_from(c10d::Store& store, const std::vector<int64_t>& indices) {
  return absent_ranks(store, indices, joined_key);
}

} // namespace tessera::internal
