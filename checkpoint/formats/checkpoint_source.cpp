#include <c10/util/Exception.h>
#include <tessera/base/error_text.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/formats/checkpoint_source.h>

namespace tessera::internal {

namespace {

// A program's own storage throws errors that need not say of what.
template <typename Call>
auto read_named(const std::string& what, const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "cannot read ", what, ": ", error_text(error));
  }
}

class Object : public ByteSource {
 public:
  Object(const checkpoint::Storage& storage, std::string name) : storage_(storage), name_(std::move(name)) {
    const auto size = read_named("the size of " + name_, [&] { return storage.size(name_); });
    TORCH_CHECK(size, "the storage has no object ", name_);
    size_ = *size;
  }
  std::string name() const override { return name_; }
  int64_t size() const override { return size_; }
  void read_at(void* data, size_t bytes, int64_t offset) const override {
    read_named(name_, [&] { storage_.read(name_, offset, data, bytes); });
  }

 private:
  const checkpoint::Storage& storage_;
  std::string name_;
  int64_t size_ = 0;
};

} // namespace

std::unique_ptr<ByteSource> CheckpointSource::open(const std::string& file) const {
  if (storage_) return std::make_unique<Object>(*storage_, checkpoint_ + "/" + file);
  return std::make_unique<File>(File::open(folder_ / file));
}

} // namespace tessera::internal
