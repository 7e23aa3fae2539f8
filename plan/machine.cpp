#include <tessera/plan/machine.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <vector>

#include <tessera/base/edit_distance.h>
#include <tessera/checkpoint/bytes/json.h>

namespace tessera {

namespace {

using internal::JsonView;
using Keys = std::vector<std::string>;

const Keys kMachineKeys{"name",
                        "hosts",
                        "ranks_a_host",
                        "device",
                        "memory_bytes",
                        "host_memory_bytes",
                        "flops_per_second",
                        "attention_efficiency",
                        "efficiency",
                        "memory_bytes_per_second",
                        "launch_seconds",
                        "dtensor_seconds",
                        "host_bytes_per_second",
                        "in_host",
                        "between_hosts"};
const Keys kFlopsKeys{"fp32", "bf16", "fp8"}, kLinkKeys{"alpha", "beta", "algorithm"};

void check_keys(const JsonView& object, const Keys& known) {
  for (const auto& [key, value] : object.fields()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    TORCH_CHECK_VALUE(false, object.where(), ": unknown key \"", key, "\"; did you mean \"", internal::nearest_of(key, known),
                      "\"?");
  }
}

double number_or(const JsonView& object, const std::string& key, double missing) {
  return object.has(key) ? object[key].number() : missing;
}

/// A number of things that may be written as 80e9.
int64_t count_or(const JsonView& object, const std::string& key, int64_t missing) {
  if (!object.has(key)) return missing;
  const double number = object[key].number();
  TORCH_CHECK_VALUE(number == std::floor(number) && std::abs(number) < 9e18, object[key].where(), " is ", number,
                    ", but must be a whole number");
  return static_cast<int64_t>(number);
}

Link link_of(const JsonView& machine, const std::string& key) {
  if (!machine.has(key)) return {};
  const auto link = machine[key];
  check_keys(link, kLinkKeys);
  Link read{.alpha = link["alpha"].number(), .beta = link["beta"].number()};
  if (!link.has("algorithm")) return read;
  const auto& name = link["algorithm"].string();
  TORCH_CHECK_VALUE(name == "ring" || name == "recursive", link["algorithm"].where(), " is \"", name,
                    "\", but must be \"ring\" or \"recursive\"");
  if (name == "recursive") read.algorithm = Link::Algorithm::kRecursive;
  return read;
}

Machine::Device device_of(const JsonView& machine) {
  if (!machine.has("device")) return Machine::Device::kCuda;
  const auto& name = machine["device"].string();
  TORCH_CHECK_VALUE(name == "cpu" || name == "cuda", machine["device"].where(), " is \"", name,
                    "\", but must be \"cpu\" or \"cuda\"");
  return name == "cpu" ? Machine::Device::kCpu : Machine::Device::kCuda;
}

Machine machine_of(const JsonView& json, const std::string& source) {
  check_keys(json, kMachineKeys);
  Machine machine;
  if (json.has("name")) machine.name = json["name"].string();
  machine.hosts = count_or(json, "hosts", 1);
  machine.ranks_a_host = count_or(json, "ranks_a_host", 1);
  machine.device = device_of(json);
  static_cast<void>(json["memory_bytes"]); // an error where it is missing
  machine.memory = count_or(json, "memory_bytes", 0);
  machine.host_memory = count_or(json, "host_memory_bytes", 0);
  const auto flops = json["flops_per_second"];
  check_keys(flops, kFlopsKeys);
  machine.fp32_flops = flops["fp32"].number();
  machine.bf16_flops = number_or(flops, "bf16", 0);
  machine.float8_flops = number_or(flops, "fp8", 0);
  machine.efficiency = number_or(json, "efficiency", 1);
  machine.attention_efficiency = number_or(json, "attention_efficiency", 0);
  machine.memory_bandwidth = json["memory_bytes_per_second"].number();
  machine.launch_seconds = number_or(json, "launch_seconds", 0);
  machine.dtensor_seconds = number_or(json, "dtensor_seconds", 0);
  machine.host_bandwidth = number_or(json, "host_bytes_per_second", 0);
  machine.in_host = link_of(json, "in_host");
  machine.between_hosts = link_of(json, "between_hosts");
  const auto needs = [&](bool is_used, const char* key) {
    TORCH_CHECK_VALUE(!is_used || json.has(key), source, ": there is no \"", key, "\", but the ranks have such links");
  };
  needs(machine.ranks_a_host > 1, "in_host");
  needs(machine.hosts > 1, "between_hosts");
  return machine;
}

nlohmann::ordered_json json_of(const Link& link) {
  return {
      {"alpha", link.alpha}, {"beta", link.beta}, {"algorithm", link.algorithm == Link::Algorithm::kRing ? "ring" : "recursive"}};
}

void check_link(const Link& link, const std::string& source, const char* key) {
  for (const auto& [value, part] : {std::pair(link.alpha, "alpha"), std::pair(link.beta, "beta")})
    TORCH_CHECK_VALUE(std::isfinite(value) && value >= 0, source, ": ", key, ".", part, " is ", value,
                      ", but must be a time, in seconds");
}

} // namespace

void Machine::check(const std::string& source) const {
  const auto positive = [&](double value, const char* key) {
    TORCH_CHECK_VALUE(std::isfinite(value) && value > 0, source, ": ", key, " is ", value, ", but must be positive");
  };
  const auto not_negative = [&](double value, const char* key) {
    TORCH_CHECK_VALUE(std::isfinite(value) && value >= 0, source, ": ", key, " is ", value, ", but must not be negative");
  };
  constexpr int64_t kMost = std::numeric_limits<int>::max(); // what a rank's type holds
  for (const auto& [value, key] : {std::pair(hosts, "hosts"), std::pair(ranks_a_host, "ranks_a_host")})
    TORCH_CHECK_VALUE(value >= 1 && value <= kMost, source, ": ", key, " is ", value, ", but must be between 1 and ", kMost);
  TORCH_CHECK_VALUE(ranks_a_host <= kMost / hosts, source, ": ", hosts, " hosts of ", ranks_a_host, " ranks are more than ",
                    kMost);
  positive(static_cast<double>(memory), "memory_bytes");
  not_negative(static_cast<double>(host_memory), "host_memory_bytes");
  positive(fp32_flops, "flops_per_second.fp32");
  not_negative(bf16_flops, "flops_per_second.bf16");
  not_negative(float8_flops, "flops_per_second.fp8");
  TORCH_CHECK_VALUE(efficiency > 0 && efficiency <= 1, source, ": efficiency is ", efficiency,
                    ", but must be a share of flops_per_second above 0 and at most 1");
  TORCH_CHECK_VALUE(attention_efficiency >= 0 && attention_efficiency <= 1, source, ": attention_efficiency is ",
                    attention_efficiency,
                    ", but must be a share of flops_per_second: above 0 and at most 1, or 0 for efficiency");
  positive(memory_bandwidth, "memory_bytes_per_second");
  not_negative(launch_seconds, "launch_seconds");
  not_negative(dtensor_seconds, "dtensor_seconds");
  not_negative(host_bandwidth, "host_bytes_per_second");
  check_link(in_host, source, "in_host");
  check_link(between_hosts, source, "between_hosts");
}

Machine Machine::with_ranks(int64_t count) const {
  TORCH_CHECK_VALUE(count >= 1, "machine: ", count, " ranks, but there must be one at least");
  auto machine = *this;
  machine.hosts = 1;
  machine.ranks_a_host = count;
  if (count <= ranks_a_host) return machine;
  TORCH_CHECK_VALUE(count % ranks_a_host == 0, "machine: ", count, " ranks fill no whole number of hosts of ", ranks_a_host);
  machine.hosts = count / ranks_a_host;
  machine.ranks_a_host = ranks_a_host;
  return machine;
}

Topology Machine::topology() const {
  return {.ranks = ranks(), .ranks_per_node = ranks_a_host, .in_node = in_host, .between_nodes = between_hosts};
}

Machine Machine::from_json(std::string_view text, const std::string& source) {
  const auto json = internal::parse_json(text, source);
  auto machine = machine_of(JsonView(json, source), source);
  machine.check(source);
  return machine;
}

Machine Machine::read(const std::string& file) {
  const std::ifstream stream(file);
  TORCH_CHECK_VALUE(stream.good() && !std::filesystem::is_directory(file), "machine: cannot read ", file);
  std::ostringstream text;
  text << stream.rdbuf();
  return from_json(text.str(), file);
}

std::string Machine::to_json() const {
  return nlohmann::ordered_json{{"name", name},
                                {"hosts", hosts},
                                {"ranks_a_host", ranks_a_host},
                                {"device", device == Device::kCpu ? "cpu" : "cuda"},
                                {"memory_bytes", memory},
                                {"host_memory_bytes", host_memory},
                                {"flops_per_second", {{"fp32", fp32_flops}, {"bf16", bf16_flops}, {"fp8", float8_flops}}},
                                {"efficiency", efficiency},
                                {"attention_efficiency", attention_efficiency},
                                {"memory_bytes_per_second", memory_bandwidth},
                                {"launch_seconds", launch_seconds},
                                {"dtensor_seconds", dtensor_seconds},
                                {"host_bytes_per_second", host_bandwidth},
                                {"in_host", json_of(in_host)},
                                {"between_hosts", json_of(between_hosts)}}
      .dump(2);
}

} // namespace tessera
