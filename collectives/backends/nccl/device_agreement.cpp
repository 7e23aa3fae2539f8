#include <tessera/collectives/backends/nccl/device_agreement.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <map>
#include <vector>

namespace tessera::internal::nccl {

namespace {

constexpr char kHasDevice = '+';
constexpr char kHasNone = '-';

std::string device_key(int64_t rank) { return c10::str("device/", rank); }

std::vector<uint8_t> encode(const DeviceAnswer& answer) {
  const auto text = answer.error.empty() ? kHasDevice + answer.identity : kHasNone + answer.error;
  return {text.begin(), text.end()};
}

} // namespace

void agree_on_devices(const GroupDescription& group, const DeviceAnswer& own, SharedDevices shared) {
  std::vector<std::string> keys;
  for (const auto rank : group.ranks) keys.push_back(device_key(rank));
  group.store->set(keys[static_cast<size_t>(group.rank)], encode(own));
  group.store->wait(keys, group.options.timeout);
  const auto answers = group.store->multiGet(keys);
  std::map<std::string, int64_t> users;
  for (size_t i = 0; i < answers.size(); ++i) {
    const std::string text(answers[i].begin(), answers[i].end());
    TORCH_CHECK(!text.empty() && text[0] == kHasDevice, "rank ", group.ranks[i], " cannot use CUDA: ", text.substr(1));
    const auto [user, is_first] = users.emplace(text.substr(1), group.ranks[i]);
    TORCH_CHECK(
        is_first || shared == SharedDevices::kAllowed, "ranks ", user->second, " and ", group.ranks[i],
        " use the same CUDA device (", user->first,
        "), and NCCL needs one for each rank: give each process another with CUDA_VISIBLE_DEVICES or TESSERA_CUDA_DEVICE");
  }
}

} // namespace tessera::internal::nccl
