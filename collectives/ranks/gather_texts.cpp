#include <tessera/collectives/ranks/gather_texts.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>

namespace tessera::internal {

namespace {

/// Every rank's `mine`, on the host and one after another.
at::Tensor gather(const at::Tensor& mine, Communicator& communicator, c10::Device device, std::string_view label) {
  auto all = at::empty({communicator.size() * mine.numel()}, mine.options().device(device));
  communicator.all_gather_into(all, mine.to(device), label).wait();
  return all.cpu();
}

at::Tensor gather(int64_t number, Communicator& communicator, c10::Device device, std::string_view label) {
  return gather(at::full({1}, number, at::kLong), communicator, device, label);
}

} // namespace

std::vector<std::string> gather_texts(const std::string& text, Communicator& communicator, c10::Device device,
                                      std::string_view label) {
  if (communicator.size() == 1) return {text};
  // The ranks beside one on the meta device are pretended, and have what it has.
  if (device.is_meta()) return std::vector<std::string>(static_cast<size_t>(communicator.size()), text);
  const auto lengths = gather(static_cast<int64_t>(text.size()), communicator, device, label);
  const auto* length = lengths.const_data_ptr<int64_t>();
  const auto longest = *std::max_element(length, length + communicator.size());
  auto bytes = at::zeros({longest}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  const auto all = gather(bytes, communicator, device, label);
  std::vector<std::string> texts;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    texts.emplace_back(static_cast<const char*>(all.const_data_ptr()) + rank * longest, static_cast<size_t>(length[rank]));
  }
  return texts;
}

std::vector<std::string> gather_texts_that_differ(const std::string& text, Communicator& communicator, c10::Device device,
                                                  std::string_view label) {
  if (communicator.size() == 1 || device.is_meta()) return {};
  const auto checksum = static_cast<int64_t>(XXH3_64bits(text.data(), text.size()));
  const auto checksums = gather(checksum, communicator, device, label);
  const auto* first = checksums.const_data_ptr<int64_t>();
  const bool same = std::all_of(first, first + communicator.size(), [&](int64_t other) { return other == *first; });
  return same ? std::vector<std::string>() : gather_texts(text, communicator, device, label);
}

void throw_failures(const std::string& failure, Communicator& communicator, c10::Device device, std::string_view label) {
  auto texts = gather_texts_that_differ(failure, communicator, device, label);
  if (texts.empty()) texts.push_back(failure);
  std::string all;
  for (const auto& text : texts) {
    if (!text.empty()) all += (all.empty() ? "" : "\n") + text;
  }
  TORCH_CHECK(all.empty(), all);
}

std::string first_difference(const std::vector<std::string>& texts, const std::vector<int64_t>& ranks, std::string_view item) {
  for (size_t other = 1; other < texts.size(); ++other) {
    if (texts[other] == texts[0]) continue;
    const auto difference = std::ranges::mismatch(texts[0], texts[other]).in1;
    const size_t line = std::string_view(texts[0].begin(), difference).rfind('\n') + 1; // npos + 1 is 0
    const auto at = [&](const std::string& text) {
      return line < text.size() ? text.substr(line, text.find('\n', line) - line) : fmt::format("no further {}", item);
    };
    return fmt::format("rank {} has {}, rank {} has {}", ranks[0], at(texts[0]), ranks[other], at(texts[other]));
  }
  return "";
}

} // namespace tessera::internal
