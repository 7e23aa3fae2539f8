#include <tessera/training/logs/event_record.h>

#include <array>
#include <bit>
#include <cstring>

namespace tessera::internal {

namespace {

static_assert(std::endian::native == std::endian::little);

enum class WireType : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

constexpr int kWallTimeField = 1, kStepField = 2, kFileVersionField = 3, kSummaryField = 5, kSessionLogField = 7; // of an Event
constexpr int kValueField = 1, kTagField = 1, kSimpleValueField = 2; // of a Summary and its values
constexpr int kStatusField = 1, kStatusStart = 1;                    // of a SessionLog

constexpr size_t kRecordLengthBytes = 8, kRecordCrcBytes = 4;

uint32_t masked_crc(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8U; }

template <typename T>
void append_fixed(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(0x80 | (value & 0x7f));
  out += static_cast<char>(value);
}

void append_key(std::string& out, int field, WireType type) {
  append_varint(out, static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(type));
}

void append_varint_field(std::string& out, int field, uint64_t value) {
  append_key(out, field, WireType::kVarint);
  append_varint(out, value);
}

void append_bytes(std::string& out, int field, std::string_view bytes) {
  append_key(out, field, WireType::kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

std::string begun_event(double wall_time, int64_t step) {
  std::string out;
  append_key(out, kWallTimeField, WireType::kFixed64);
  append_fixed(out, wall_time);
  append_varint_field(out, kStepField, static_cast<uint64_t>(step));
  return out;
}

std::string framed(std::string_view data) {
  std::string record;
  append_fixed(record, uint64_t{data.size()});
  append_fixed(record, masked_crc(crc32c(record)));
  record += data;
  append_fixed(record, masked_crc(crc32c(data)));
  return record;
}

template <typename T>
T fixed_at(std::string_view bytes, size_t offset) {
  T value{};
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

/// Reads the fields of a protobuf message one after another.
class MessageFields {
 public:
  explicit MessageFields(std::string_view message) : rest_(message) {}

  /// The next field; none at the end, and where the message is damaged.
  bool next() {
    const auto key = varint();
    if (!key) return false;
    field_ = static_cast<int>(*key >> 3);
    switch (static_cast<WireType>(*key & 7)) {
      case WireType::kVarint: return take_number();
      case WireType::kFixed64: return skip(8);
      case WireType::kFixed32: return skip(4);
      case WireType::kBytes: {
        const auto size = varint();
        return size && skip(*size);
      }
    }
    return false;
  }

  int field() const { return field_; }
  uint64_t number() const { return number_; }

 private:
  std::optional<uint64_t> varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(rest_.front());
      rest_.remove_prefix(1);
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  }

  bool take_number() {
    const auto value = varint();
    number_ = value.value_or(0);
    return value.has_value();
  }

  bool skip(uint64_t bytes) {
    if (bytes > rest_.size()) return false;
    rest_.remove_prefix(bytes);
    return true;
  }

  std::string_view rest_;
  int field_ = 0;
  uint64_t number_ = 0;
};

} // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0x82f63b78U : 0U);
      table[i] = value;
    }
    return table;
  }();
  uint32_t crc = ~0U;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<uint8_t>(c)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

std::string version_record(double wall_time) {
  auto data = begun_event(wall_time, 0);
  append_bytes(data, kFileVersionField, "brain.Event:2");
  return framed(data);
}

std::string start_record(double wall_time, int64_t step) {
  auto data = begun_event(wall_time, step);
  std::string session;
  append_varint_field(session, kStatusField, kStatusStart);
  append_bytes(data, kSessionLogField, session);
  return framed(data);
}

std::string scalars_record(double wall_time, int64_t step, const std::vector<std::pair<std::string, double>>& numbers) {
  std::string summary;
  for (const auto& [tag, number] : numbers) {
    std::string value;
    append_bytes(value, kTagField, tag);
    append_key(value, kSimpleValueField, WireType::kFixed32);
    append_fixed(value, static_cast<float>(number));
    append_bytes(summary, kValueField, value);
  }
  auto data = begun_event(wall_time, step);
  append_bytes(data, kSummaryField, summary);
  return framed(data);
}

std::optional<ParsedRecord> parse_record(std::string_view bytes) {
  constexpr size_t kFrame = kRecordLengthBytes + 2 * kRecordCrcBytes;
  if (bytes.size() < kFrame) return std::nullopt;
  const auto length = fixed_at<uint64_t>(bytes, 0);
  if (fixed_at<uint32_t>(bytes, kRecordLengthBytes) != masked_crc(crc32c(bytes.substr(0, kRecordLengthBytes))))
    return std::nullopt;
  if (length > bytes.size() - kFrame) return std::nullopt;
  const auto data = bytes.substr(kRecordLengthBytes + kRecordCrcBytes, length);
  if (fixed_at<uint32_t>(bytes, kRecordLengthBytes + kRecordCrcBytes + length) != masked_crc(crc32c(data))) return std::nullopt;
  ParsedRecord record{kFrame + length, 0};
  for (MessageFields fields(data); fields.next();) {
    if (fields.field() == kStepField) record.step = static_cast<int64_t>(fields.number());
  }
  return record;
}

} // namespace tessera::internal
