#include <tessera/fsdp/group/profiler_range.h>

#include <absl/strings/strip.h>

#include <algorithm>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/fsdp/group/parameter_group.h>

namespace tessera::internal {

std::string ProfilerRange::name(const char* what, const ParameterGroup& group) {
  constexpr size_t kMostNames = 4;
  const auto count = group.parameters().size();
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(count, kMostNames); ++i)
    names.emplace_back(absl::StripPrefix(group.full_name(i), group.label() + "."));
  const auto others = count > kMostNames ? fmt::format(" and {} more", count - kMostNames) : "";
  return fmt::format("FSDP::{} ({}: {}{})", what, group.label(), fmt::join(names, ", "), others);
}

} // namespace tessera::internal
