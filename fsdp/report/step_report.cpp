#include <tessera/fsdp/step_report.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <ostream>

#include <tessera/base/text_table.h>

namespace tessera {

namespace {

using nlohmann::ordered_json;

Traffic sum(const std::vector<GroupReport>& groups, Traffic GroupReport::*kind) {
  Traffic sum;
  for (const auto& group : groups) {
    sum.calls += (group.*kind).calls;
    sum.bytes += (group.*kind).bytes;
  }
  return sum;
}

ordered_json json_of(const Traffic& traffic) { return {{"calls", traffic.calls}, {"bytes", traffic.bytes}}; }

ordered_json json_of_wait(const GroupReport& group, double seconds) {
  return group.waits_on_streams ? ordered_json() : ordered_json(seconds);
}

ordered_json json_of(const GroupReport& group) {
  return {{"name", group.name},
          {"all_gathers", json_of(group.all_gathers)},
          {"reduce_scatters", json_of(group.reduce_scatters)},
          {"all_reduces", json_of(group.all_reduces)},
          {"gather_wait_seconds", json_of_wait(group, group.gather_wait_seconds)},
          {"reduce_wait_seconds", json_of_wait(group, group.reduce_wait_seconds)},
          {"waits_on_streams", group.waits_on_streams},
          {"prefetch_hits", group.prefetch_hits},
          {"prefetch_misses", group.prefetch_misses},
          {"unsharded_bytes", group.unsharded_bytes}};
}

std::string text_of(const Traffic& traffic) {
  return traffic.calls == 0 ? "-" : fmt::format("{} ({} B)", traffic.calls, traffic.bytes);
}

std::string milliseconds(double seconds) { return fmt::format("{:.3f}", 1e3 * seconds); }

internal::TextRow row_of(const GroupReport& group) {
  const auto wait = [&](double seconds) { return group.waits_on_streams ? "-" : milliseconds(seconds); };
  return {group.name,
          text_of(group.all_gathers),
          wait(group.gather_wait_seconds),
          fmt::format("{} of {}", group.prefetch_hits, group.prefetch_hits + group.prefetch_misses),
          std::to_string(group.unsharded_bytes),
          text_of(group.reduce_scatters),
          text_of(group.all_reduces),
          wait(group.reduce_wait_seconds)};
}

} // namespace

Traffic StepReport::all_gathers() const { return sum(groups, &GroupReport::all_gathers); }
Traffic StepReport::reduce_scatters() const { return sum(groups, &GroupReport::reduce_scatters); }
Traffic StepReport::all_reduces() const { return sum(groups, &GroupReport::all_reduces); }

double StepReport::exposed_seconds() const {
  double seconds = 0;
  for (const auto& group : groups) {
    if (!group.waits_on_streams) seconds += group.gather_wait_seconds + group.reduce_wait_seconds;
  }
  return seconds;
}

std::string StepReport::to_string() const {
  const bool waits_on_streams = std::any_of(groups.begin(), groups.end(), [](const auto& each) { return each.waits_on_streams; });
  std::vector<internal::TextRow> rows{
      {"group", "all-gathers", "waited ms", "gathered ahead", "unsharded", "reduce-scatters", "all-reduces", "waited ms"}};
  for (const auto& group : groups) rows.push_back(row_of(group));
  return internal::text_table(rows,
                              {"all-gathers", "waited ms", "gathered ahead", "unsharded", "reduce-scatters", "all-reduces"}) +
         fmt::format(
             "\nrank {}: {} ms, of which {} ms waiting for collectives; all-gathers {}, reduce-scatters {}, all-reduces {} "
             "(calls and bytes); at most {} bytes unsharded\n",
             rank, milliseconds(seconds), waits_on_streams ? "-" : milliseconds(exposed_seconds()), text_of(all_gathers()),
             text_of(reduce_scatters()), text_of(all_reduces()), peak_unsharded_bytes);
}

std::string StepReport::to_json() const {
  ordered_json object{{"format", "tessera step report"},
                      {"version", 1},
                      {"rank", rank},
                      {"seconds", seconds},
                      {"peak_unsharded_bytes", peak_unsharded_bytes},
                      {"groups", ordered_json::array()}};
  for (const auto& group : groups) object["groups"].push_back(json_of(group));
  return object.dump(2);
}

std::ostream& operator<<(std::ostream& out, const StepReport& report) { return out << report.to_string(); }

} // namespace tessera
