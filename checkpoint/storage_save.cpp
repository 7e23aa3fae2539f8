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
#include <exception>
#include <optional>
#include <string_view>
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

// Whether an object holds this text, though its writer threw: an answer may be lost on its way. Nothing where that is not known.
std::optional<bool> holds(const checkpoint::Storage& storage, const std::string& object, const std::string& text) {
  try {
    if (storage.size(object) != static_cast<int64_t>(text.size())) return false;
    std::string found(text.size(), '\0');
    storage.read(object, 0, found.data(), found.size());
    return found == text;
  } catch (...) {
    return {};
  }
}

bool remove_quietly(checkpoint::Storage& storage, const std::string& object) {
  try {
    storage.remove(object);
    return true;
  } catch (...) {
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

void StorageSave::put_index(const std::string& text, bool& may_be_there) {
  const auto index = object(kIndexName);
  try {
    const auto writer = storage_.create(index);
    TORCH_CHECK(writer, "the storage gave no writer for ", index);
    writer->append(text.data(), text.size());
    writer->close();
    check_written(storage_, index, static_cast<int64_t>(text.size()));
  } catch (...) {
    const auto is_there = holds(storage_, index, text);
    if (is_there.value_or(false)) return;
    // One that was there before stays, and the new one may have taken its place unseen.
    may_be_there = replaces_ ? !is_there.has_value() : !remove_quietly(storage_, index);
    throw;
  }
}

constexpr std::string_view kMayBeThere = "?", kIsNotThere = "-"; // before the text of a failure

// Rank 0's: nothing, or why not.
std::string StorageSave::try_to_put_index(const std::function<std::string()>& encode) {
  bool may_be_there = false;
  try {
    put_index(encode(), may_be_there);
    return "";
  } catch (...) {
    return std::string(may_be_there ? kMayBeThere : kIsNotThere) + error_text(std::current_exception());
  }
}

void StorageSave::commit(const std::function<std::string()>& encode) {
  keeps_data_ = true; // the vote may be cut off: by a rank that is killed, or by a timeout while rank 0 writes
  const auto failure = all("commit", [&] { return ranks_.rank() == 0 ? try_to_put_index(encode) : std::string(); })[0];
  keeps_data_ = !failure.starts_with(kIsNotThere);
  TORCH_CHECK(failure.empty(), "checkpoint: cannot commit ", name_, ": ", describe_ranks({ranks_.rank_of_job(0)}), ": ",
              failure.substr(1));
  all("tidy up after the save of", [&] {
    if (ranks_.rank() != 0) return;
    for (const auto& old : data_objects(storage_, name_)) {
      if (!old.starts_with(object(token_))) storage_.remove(old);
    }
    if (options_.keep_last > 0) keep_last(storage_, options_.keep_last, name_);
  });
}

StorageSave::~StorageSave() {
  if (keeps_data_) return;
  for (const auto& object : made_) remove_quietly(storage_, object); // what stays is removed by the next save of the name
}

} // namespace tessera::internal

namespace tessera::checkpoint {

std::string latest(const Storage& storage, const std::string& prefix) {
  const auto checkpoints = internal::list_checkpoints(storage, prefix);
  return checkpoints.empty() ? std::string() : checkpoints.back().second;
}

} // namespace tessera::checkpoint
