#include <tessera/base/error_text.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/open.h>
#include <tessera/checkpoint/formats/reader.h>

namespace tessera::checkpoint {

namespace {

std::vector<std::string> verify(const std::function<internal::Opened()>& open) {
  try {
    const auto [source, index] = open();
    return internal::Reader(source, index, index.has_checksums).verify_all();
  } catch (const std::exception& error) { // also those of std::filesystem, and of a program's storage
    return {internal::error_text(error)};
  }
}

} // namespace

std::vector<std::string> verify(const std::filesystem::path& dir) {
  return verify([&] { return internal::open_checkpoint(dir); });
}

std::vector<std::string> verify(const Storage& storage, const std::string& name) {
  return verify([&] { return internal::open_checkpoint(storage, name); });
}

} // namespace tessera::checkpoint
