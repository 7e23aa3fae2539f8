#include <c10/util/Exception.h>
#include <tessera/checkpoint/checksum.h>
#include <tessera/checkpoint/gathers.h>
#include <tessera/checkpoint/json.h>

#include <algorithm>

namespace tessera::checkpoint {

std::string Gathers::to_message() const {
  auto gathers = Json::array();
  for (const auto& [ranks, names] : names_) gathers.push_back({{"ranks", ranks}, {"names", to_hex(checksum(names))}});
  return dump_json({{"gathers", std::move(gathers)}}, "the state dict");
}

void Gathers::check_same(const std::vector<std::string>& messages, const std::string& step) {
  std::vector<std::map<std::vector<int64_t>, std::string>> all;
  for (const auto& message : messages) {
    const auto json = parse_json(message, "a rank's message");
    auto& gathers = all.emplace_back();
    for (const auto& gather : json["gathers"]) gathers[gather["ranks"]] = gather["names"];
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const auto& [group, names] : all[rank]) {
      for (const auto other : group) {
        const auto& others = all[static_cast<size_t>(other)];
        const auto found = others.find(group);
        const auto first = std::min(static_cast<int64_t>(rank), other), second = std::max(static_cast<int64_t>(rank), other);
        TORCH_CHECK(found != others.end() && found->second == names, "checkpoint: cannot ", step, ": rank ", second,
                    " would gather other tensors than rank ", first);
      }
    }
  }
}

} // namespace tessera::checkpoint
