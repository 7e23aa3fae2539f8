#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/byte_source.h>

namespace tessera::internal {

std::string read_all(const ByteSource& source, int64_t limit) {
  TORCH_CHECK(source.size() <= limit, source.name(), " has ", source.size(), " bytes, more than the ", limit, " it may have");
  std::string text(static_cast<size_t>(source.size()), '\0');
  source.read_at(text.data(), text.size(), 0);
  return text;
}

} // namespace tessera::internal
