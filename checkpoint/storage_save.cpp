#include <c10/util/Exception.h>
#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/checksum.h>
#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/storage_save.h>
#include <tessera/collectives/error_text.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <tuple>
#include <utility>

namespace tessera::internal {

namespace {

// An object is whole when it is as long as what was appended.
void check_written(const checkpoint::Storage& storage, const std::string& object, int64_t bytes) {
  const auto size = storage.size(object);
  TORCH_CHECK(size == bytes, object, " has ", size ? std::to_string(*size) + " bytes" : "no bytes", " in the storage, where ",
              bytes, " were written");
}

class ObjectFile : public PartFile {
 public:
  ObjectFile(checkpoint::Storage& storage, std::string object)
      : storage_(storage), object_(std::move(object)), writer_(storage.create(object_)) {
    TORCH_CHECK(writer_, "the storage gave no writer for ", object_);
  }
  void write_prefix(std::string_view prefix) override { append(prefix.data(), static_cast<int64_t>(prefix.size())); }
  std::vector<uint64_t> write_tensor(const at::Tensor& tensor, int64_t begin) override {
    TORCH_INTERNAL_ASSERT(begin == written_);
    const auto* bytes = static_cast<const char*>(tensor.const_data_ptr());
    const auto total = static_cast<int64_t>(tensor.nbytes());
    std::vector<uint64_t> checksums;
    for (int64_t at = 0; at < total; at += kBlockBytes) {
      const auto size = std::min(kBlockBytes, total - at);
      checksums.push_back(checksum(bytes + at, static_cast<size_t>(size)));
      append(bytes + at, size);
    }
    return checksums;
  }
  void close() override {
    writer_->close();
    check_written(storage_, object_, written_);
  }

 private:
  void append(const char* data, int64_t bytes) {
    writer_->append(data, static_cast<size_t>(bytes));
    written_ += bytes;
  }

  checkpoint::Storage& storage_;
  std::string object_;
  std::unique_ptr<checkpoint::ObjectWriter> writer_;
  int64_t written_ = 0;
};

void check_name(const std::string& name) {
  TORCH_CHECK(!name.empty() && !name.starts_with('/') && !name.ends_with('/'), "\"", name,
              "\" is no name of a checkpoint in a storage: it must not be empty, nor begin or end with '/'");
}

// Whether an object holds this text, though its writer threw: an answer may be lost on its way.
bool holds(const checkpoint::Storage& storage, const std::string& object, const std::string& text) {
  try {
    if (storage.size(object) != static_cast<int64_t>(text.size())) return false;
    std::string found(text.size(), '\0');
    storage.read(object, 0, found.data(), found.size());
    return found == text;
  } catch (const std::exception&) {
    return false;
  }
}

// The checkpoints whose indexes lie under `prefix`, oldest first. One that is removed meanwhile is none.
std::vector<std::pair<int64_t, std::string>> list_checkpoints(const checkpoint::Storage& storage, const std::string& prefix) {
  const std::string end = std::string("/") + kIndexName;
  std::vector<std::pair<int64_t, std::string>> found;
  for (const auto& object : storage.list(prefix)) {
    if (!object.ends_with(end)) continue;
    const auto name = object.substr(0, object.size() - end.size());
    try {
      found.emplace_back(open_checkpoint(storage, name).index.saved_at, name);
    } catch (const std::exception&) {
      if (storage.size(object)) throw;
    }
  }
  std::ranges::sort(found);
  return found;
}

// What saves write directly under a checkpoint's name. Other objects there are of others.
std::vector<std::string> data_objects(const checkpoint::Storage& storage, const std::string& name) {
  auto objects = storage.list(name + "/");
  std::erase_if(objects, [&](const std::string& object) {
    const auto file = object.substr(name.size() + 1);
    return file.find('/') != std::string::npos || !file.starts_with("data-") || !file.ends_with(".safetensors");
  });
  return objects;
}

// The index first: from then on it is no checkpoint.
void remove_checkpoint(checkpoint::Storage& storage, const std::string& name) {
  storage.remove(name + "/" + kIndexName);
  for (const auto& object : data_objects(storage, name)) storage.remove(object);
}

void keep_last(checkpoint::Storage& storage, int count, const std::string& newest) {
  const auto folder = newest.substr(0, newest.rfind('/') + 1); // empty at the top
  auto checkpoints = list_checkpoints(storage, folder);
  std::erase_if(checkpoints, [&](const auto& checkpoint) {
    const auto& name = checkpoint.second;
    const bool beside = name.find('/', folder.size()) == std::string::npos;
    return !beside || name == newest || series_of(name) != series_of(newest);
  });
  for (size_t i = 0; i + static_cast<size_t>(count) <= checkpoints.size(); ++i) remove_checkpoint(storage, checkpoints[i].second);
}

} // namespace

StorageSave::StorageSave(const Ranks& ranks, checkpoint::Storage& storage, std::string name,
                         const checkpoint::SaveOptions& options, const Prepare& prepare)
    : ranks_(ranks), storage_(storage), name_(std::move(name)), options_(options) {
  auto started = start_save(ranks, name_, options, prepare, [&] {
    check_name(name_);
    TORCH_CHECK(options_.keep_last >= 0, "keep_last is ", options_.keep_last);
    if (options_.keep_last > 0) check_has_number(name_);
    if (ranks_.rank() == 0) start();
    return token_;
  });
  token_ = std::move(started.place);
}

// Rank 0's.
void StorageSave::start() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  time_ = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  token_ = "data-" + std::to_string(time_) + "-" + std::to_string(::getpid()) + "-";
  replaces_ = storage_.size(object(kIndexName)).has_value();
  if (!replaces_) return;
  TORCH_CHECK(options_.overwrite, name_, " exists already; a checkpoint is never changed (SaveOptions::overwrite replaces it)");
  time_ = std::max(time_, open_checkpoint(storage_, name_).index.saved_at + 1);
}

NewFiles StorageSave::new_files() {
  const auto create = [this](const std::string& file) {
    made_.push_back(object(file));
    return std::make_unique<ObjectFile>(storage_, object(file));
  };
  return {create, token_};
}

void StorageSave::put_index(const std::string& text) {
  const auto index = object(kIndexName);
  try {
    const auto writer = storage_.create(index);
    TORCH_CHECK(writer, "the storage gave no writer for ", index);
    writer->append(text.data(), text.size());
    writer->close();
    check_written(storage_, index, static_cast<int64_t>(text.size()));
  } catch (const std::exception&) {
    if (holds(storage_, index, text)) return;
    if (!replaces_) made_.insert(made_.begin(), index); // removed first
    throw;
  }
}

void StorageSave::commit(const std::function<std::string()>& encode) {
  all("commit", [&] {
    if (ranks_.rank() == 0) put_index(encode());
  });
  committed_ = true;
  all("tidy up after the save of", [&] {
    if (ranks_.rank() != 0) return;
    for (const auto& old : data_objects(storage_, name_)) {
      if (!old.starts_with(object(token_))) storage_.remove(old);
    }
    if (options_.keep_last > 0) keep_last(storage_, options_.keep_last, name_);
  });
}

StorageSave::~StorageSave() {
  if (committed_) return;
  for (const auto& object : made_) {
    try {
      storage_.remove(object);
    } catch (...) { // NOLINT(bugprone-empty-catch): it is no part of a checkpoint, and the next save of the name removes it
    }
  }
}

} // namespace tessera::internal

namespace tessera::checkpoint {

std::string latest(const Storage& storage, const std::string& prefix) {
  const auto checkpoints = internal::list_checkpoints(storage, prefix);
  return checkpoints.empty() ? std::string() : checkpoints.back().second;
}

} // namespace tessera::checkpoint
