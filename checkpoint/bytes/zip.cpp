#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/zip.h>

#include <algorithm>
#include <bit>
#include <concepts>
#include <limits>

namespace tessera::internal {

static_assert(std::endian::native == std::endian::little, "zip archives are little-endian");

namespace {

constexpr int64_t kMost32 = std::numeric_limits<uint32_t>::max();
constexpr uint16_t kMost16 = std::numeric_limits<uint16_t>::max();
constexpr uint16_t kVersion = 45; // of zip: 64-bit sizes
constexpr uint16_t kUtf8 = 1 << 11;
constexpr uint16_t kDay = (1 << 5) + 1; // 1980-01-01, the first that a zip archive can name
constexpr int64_t kFixedHeader = 30;
constexpr int64_t kLargeSizes = 20; // of the extra field with 64-bit sizes
constexpr uint16_t kLargeField = 1;
constexpr uint16_t kPaddingField = 0x4246; // "FB", PyTorch's

class Bytes {
 public:
  template <std::unsigned_integral T>
  Bytes& add(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  Bytes& add(const std::string& text) {
    text_ += text;
    return *this;
  }
  std::string take() && { return std::move(text_); }

 private:
  std::string text_;
};

bool is_large(int64_t value) { return value >= kMost32; }
uint32_t clamped(int64_t value) { return static_cast<uint32_t>(std::min(value, kMost32)); }
uint16_t length(size_t bytes) {
  TORCH_CHECK(bytes < kMost16, "a zip archive holds no field of ", bytes, " bytes");
  return static_cast<uint16_t>(bytes);
}

// What headers and the directory have in common.
void add_description(Bytes& out, const ZipEntry& entry, const std::string& extra) {
  out.add(kVersion).add(kUtf8).add(uint16_t{0} /* stored */).add(uint16_t{0}).add(kDay).add(entry.crc);
  out.add(clamped(entry.bytes)).add(clamped(entry.bytes)).add(length(entry.name.size())).add(length(extra.size()));
}

std::string directory_entry(const ZipEntry& entry) {
  Bytes large;
  if (is_large(entry.bytes)) large.add(static_cast<uint64_t>(entry.bytes)).add(static_cast<uint64_t>(entry.bytes));
  if (is_large(entry.header_begin)) large.add(static_cast<uint64_t>(entry.header_begin));
  const auto numbers = std::move(large).take();
  Bytes extra;
  if (!numbers.empty()) extra.add(kLargeField).add(length(numbers.size())).add(numbers);
  const auto fields = std::move(extra).take();
  Bytes out;
  out.add(uint32_t{0x02014b50}).add(kVersion);
  add_description(out, entry, fields);
  out.add(uint16_t{0}).add(uint16_t{0}).add(uint16_t{0}).add(uint32_t{0}).add(clamped(entry.header_begin));
  return std::move(out.add(entry.name).add(fields)).take();
}

} // namespace

int64_t least_zip_header(const std::string& name, int64_t bytes) {
  return kFixedHeader + static_cast<int64_t>(name.size()) + (is_large(bytes) ? kLargeSizes : 0);
}

std::string zip_header(const ZipEntry& entry) {
  Bytes extra;
  if (is_large(entry.bytes)) {
    extra.add(kLargeField).add(uint16_t{16});
    extra.add(static_cast<uint64_t>(entry.bytes)).add(static_cast<uint64_t>(entry.bytes));
  }
  const auto padding = entry.data_begin - entry.header_begin - least_zip_header(entry.name, entry.bytes);
  TORCH_INTERNAL_ASSERT(padding == 0 || padding >= kZipPadding);
  if (padding > 0) {
    const std::string fill(static_cast<size_t>(padding - kZipPadding), '\0');
    extra.add(kPaddingField).add(length(fill.size())).add(fill);
  }
  const auto fields = std::move(extra).take();
  Bytes out;
  out.add(uint32_t{0x04034b50});
  add_description(out, entry, fields);
  return std::move(out.add(entry.name).add(fields)).take();
}

std::string zip_directory(const std::vector<ZipEntry>& entries, int64_t begin) {
  std::string directory;
  for (const auto& entry : entries) directory += directory_entry(entry);
  const auto count = static_cast<uint64_t>(entries.size()), bytes = static_cast<uint64_t>(directory.size());
  Bytes end;
  if (count >= kMost16 || is_large(begin) || is_large(static_cast<int64_t>(bytes))) {
    end.add(uint32_t{0x06064b50}).add(uint64_t{44}).add(kVersion).add(kVersion).add(uint32_t{0}).add(uint32_t{0});
    end.add(count).add(count).add(bytes).add(static_cast<uint64_t>(begin));
    end.add(uint32_t{0x07064b50}).add(uint32_t{0}).add(static_cast<uint64_t>(begin) + bytes).add(uint32_t{1});
  }
  const auto few = static_cast<uint16_t>(std::min<uint64_t>(count, kMost16));
  end.add(uint32_t{0x06054b50}).add(uint16_t{0}).add(uint16_t{0}).add(few).add(few);
  end.add(clamped(static_cast<int64_t>(bytes))).add(clamped(begin)).add(uint16_t{0});
  return directory + std::move(end).take();
}

} // namespace tessera::internal
