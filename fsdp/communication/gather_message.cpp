#include <tessera/fsdp/communication/gather_message.h>

#include <ATen/ceil_div.h>

#include <algorithm>
#include <map>

#include <tessera/base/tensor_over.h>

namespace tessera::internal {

/// The places where the content of messages lies, in bytes; `CodedRange::first` is in elements of the dtype.
struct GatherMessages::Places {
  struct Raw {
    int64_t part, message, bytes;
  };
  std::vector<Raw> raw;
  std::map<c10::ScalarType, std::vector<CodedRange>> coded;
};

namespace {

/// `bytes` as numbers of `dtype`; a rest that is no whole number is left out.
at::Tensor as_numbers(const at::Tensor& bytes, c10::ScalarType dtype) {
  const auto numel = bytes.numel() / static_cast<int64_t>(c10::elementSize(dtype));
  return tensor_over(bytes.storage(), bytes.storage_offset(), {numel}, dtype);
}

} // namespace

/// Adds those of rank `rank`, whose part begins at `part` and whose message at `message`; returns where the message ends.
int64_t GatherMessages::add_places(const GroupLayout& layout, int64_t sent_bytes, int64_t rank, int64_t part, int64_t message,
                                   Places& places) const {
  const auto add_raw = [&](int64_t from, int64_t bytes) {
    if (bytes == 0) return;
    places.raw.push_back({part + from, message, bytes});
    message = at::round_up(message + bytes, kParameterAlignment);
  };
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = layout.parameters[i];
    const auto piece = parameter.pieces[static_cast<size_t>(rank)];
    if (piece.numel == 0 || parameter.is_replicated() || !parameters_[i].is_sent) continue;
    const auto item = static_cast<int64_t>(c10::elementSize(parameters_[i].dtype));
    if (!parameters_[i].is_quantized) {
      add_raw(piece.shard_offset, piece.numel * item);
      continue;
    }
    places.coded[parameters_[i].dtype].push_back({(part + piece.shard_offset) / item, piece.numel, message});
    message = at::round_up(message + codec_.bytes(piece.numel), kParameterAlignment);
  }
  add_raw(layout.shard_bytes, sent_bytes - layout.shard_bytes); // of gather extensions
  return message;
}

int64_t GatherMessages::largest(const GroupLayout& layout, int64_t sent_bytes, const MessageRanks& ranks) const {
  int64_t most = kParameterAlignment;
  for (int64_t peer = 0; peer < ranks.peers; ++peer) {
    Places places;
    int64_t end = 0;
    for (int64_t k = 0; k < ranks.each; ++k)
      end = add_places(layout, sent_bytes, ranks.first + peer * ranks.each + k, 0, end, places);
    most = std::max(most, end);
  }
  return most;
}

void GatherMessages::encode(const GroupLayout& layout, int64_t sent_bytes, const MessageRanks& ranks, const at::Tensor& parts,
                            const at::Tensor& message) const {
  Places places;
  int64_t end = 0;
  for (int64_t k = 0; k < ranks.each; ++k)
    end = add_places(layout, sent_bytes, ranks.first + ranks.own * ranks.each + k, k * sent_bytes, end, places);
  for (const auto& raw : places.raw) message.narrow(0, raw.message, raw.bytes).copy_(parts.narrow(0, raw.part, raw.bytes));
  for (const auto& [dtype, ranges] : places.coded) tessera::encode(codec_, ranges, as_numbers(parts, dtype), message);
}

void GatherMessages::decode(const GroupLayout& layout, int64_t sent_bytes, const MessageRanks& ranks, const at::Tensor& messages,
                            const at::Tensor& parts) const {
  Places places;
  for (int64_t peer = 0; peer < ranks.peers; ++peer) {
    int64_t end = peer * (messages.numel() / ranks.peers);
    for (int64_t k = peer * ranks.each; k < (peer + 1) * ranks.each; ++k)
      end = add_places(layout, sent_bytes, ranks.first + k, k * sent_bytes, end, places);
  }
  for (const auto& raw : places.raw) parts.narrow(0, raw.part, raw.bytes).copy_(messages.narrow(0, raw.message, raw.bytes));
  for (const auto& [dtype, ranges] : places.coded) tessera::decode(codec_, ranges, messages, as_numbers(parts, dtype));
}

} // namespace tessera::internal
