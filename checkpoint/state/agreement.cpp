#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/bytes/json.h>
#include <tessera/checkpoint/state/agreement.h>

#include <algorithm>
#include <set>

namespace tessera::internal {

std::string Agreement::to_message() const {
  auto sums = tensors_;
  for (auto& [ranks, names] : sums) names = to_hex(checksum(names));
  return dump_json({{"tensors", sums}, {"settings", settings_}}, "the state dict");
}

void Agreement::check(const std::vector<std::string>& messages, const Ranks& ranks, const std::string& step,
                      const std::string& difference) {
  std::vector<Tensors> tensors; // their checksums
  std::vector<Settings> settings;
  for (const auto& message : messages) {
    const auto json = parse_json(message, "a rank's message");
    tensors.push_back(json["tensors"].get<Tensors>());
    settings.push_back(json["settings"].get<Settings>());
  }
  check_tensors(tensors, ranks, step, difference);
  check_settings(settings, ranks);
}

void Agreement::check_tensors(const std::vector<Tensors>& all, const Ranks& ranks, const std::string& step,
                              const std::string& difference) {
  for (size_t position = 0; position < all.size(); ++position) {
    const auto rank = ranks.rank_of_job(position);
    for (const auto& [group, names] : all[position]) {
      for (const auto other : group) {
        const auto& others = all[ranks.position_of(other)];
        const auto found = others.find(group);
        TORCH_CHECK(found != others.end() && found->second == names, "checkpoint: cannot ", step, ": rank ",
                    std::max(rank, other), " would ", difference, " than rank ", std::min(rank, other));
      }
    }
  }
}

void Agreement::check_settings(const std::vector<Settings>& all, const Ranks& ranks) {
  std::map<std::string, std::vector<std::string>> texts; // of each rank, by name
  for (size_t position = 0; position < all.size(); ++position) {
    for (const auto& [name, text] : all[position]) texts.try_emplace(name, all.size()).first->second[position] = text;
  }
  for (const auto& [name, of_ranks] : texts) {
    std::set<std::string> different(of_ranks.begin(), of_ranks.end());
    different.erase(""); // ranks without it
    TORCH_CHECK(different.size() <= 1, "checkpoint: cannot load \"", name, "\", which differs between ranks:\n",
                ranks.by_ranks(of_ranks));
  }
}

} // namespace tessera::internal
