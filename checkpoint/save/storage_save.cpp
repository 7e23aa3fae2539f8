#include <c10/util/Exception.h>
#include <tessera/base/error_text.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/formats/checkpoint_source.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/formats/open.h>
#include <tessera/checkpoint/save/catalog.h>
#include <tessera/checkpoint/save/storage_save.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <exception>
#include <limits>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
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

constexpr std::string_view kDataStart = "data-";

// Finds when the save began that wrote this data object; nothing for an object of others.
std::optional<int64_t> time_of_data(std::string_view file) {
  if (!file.starts_with(kDataStart) || !file.ends_with(".safetensors")) return std::nullopt;
  int64_t time = -1;
  const auto [end, error] = std::from_chars(file.data() + kDataStart.size(), file.data() + file.size(), time);
  return error == std::errc() && *end == '-' && time >= 0 ? std::optional(time) : std::nullopt;
}

// What lies directly under a name.
struct StoredObjects {
  bool has_index = false;
  std::vector<std::string> data; // what saves wrote; other objects are of others
  int64_t time = 0;              // of the newest of them
};
using StoredNames = std::map<std::string, StoredObjects>;

StoredNames stored_under(const checkpoint::Storage& storage, const std::string& prefix) {
  StoredNames names;
  for (const auto& object : storage.list(prefix)) {
    const auto slash = object.rfind('/');
    if (slash == std::string::npos) continue;
    const auto name = object.substr(0, slash), file = object.substr(slash + 1);
    if (file == kIndexName) names[name].has_index = true;
    if (const auto time = time_of_data(file)) {
      names[name].data.push_back(object);
      names[name].time = std::max(names[name].time, *time);
    }
  }
  return names;
}

// Lists the checkpoints whose names differ from `name` in the last number alone, with it. Nothing where it has no number.
StoredNames series_beside(const checkpoint::Storage& storage, const std::string& name) {
  const auto series = series_of(name);
  if (!series) return {};
  const auto folder = name.substr(0, name.rfind('/') + 1); // empty at the top
  auto names = stored_under(storage, folder + series->first);
  std::erase_if(names, [&](const auto& each) {
    return each.first.find('/', folder.size()) != std::string::npos || series_of(each.first) != series;
  });
  return names;
}

struct DamagedIndex {
  int64_t time; // of the data beside it
  std::string error;
};

struct StoredCheckpoints {
  std::vector<std::pair<int64_t, std::string>> whole; // when they were saved, and their names; oldest first
  std::vector<DamagedIndex> damaged;
};

// An index of others, and one that is removed meanwhile, is none.
void add_checkpoint(const checkpoint::Storage& storage, const std::string& name, const StoredObjects& objects,
                    StoredCheckpoints& found) {
  try {
    const auto index = CheckpointSource(storage, name).open(kIndexName);
    if (!begins_as_index(*index) && objects.data.empty()) return;
    found.whole.emplace_back(parse_index(read_all(*index, kMaxIndexBytes), index->name()).saved_at, name);
  } catch (const std::exception& error) {
    if (!storage.size(name + "/" + kIndexName)) return;
    const auto time = objects.data.empty() ? std::numeric_limits<int64_t>::max() : objects.time;
    found.damaged.push_back({time, error_text(error)});
  }
}

StoredCheckpoints read_stored(const checkpoint::Storage& storage, const StoredNames& names) {
  StoredCheckpoints found;
  for (const auto& [name, objects] : names) {
    if (objects.has_index) add_checkpoint(storage, name, objects, found);
  }
  std::ranges::sort(found.whole);
  return found;
}

// Removes what it can; `finish` throws the first error.
class Removal {
 public:
  explicit Removal(checkpoint::Storage& storage) : storage_(storage) {}
  bool remove(const std::string& object) {
    try {
      storage_.remove(object);
      return true;
    } catch (...) {
      if (!error_) error_ = std::current_exception();
      return false;
    }
  }
  void finish() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  checkpoint::Storage& storage_;
  std::exception_ptr error_;
};

bool remove_quietly(checkpoint::Storage& storage, const std::string& object) { return Removal(storage).remove(object); }

void keep_last(const checkpoint::Storage& storage, int count, const std::string& newest, Removal& removal) {
  auto names = series_beside(storage, newest); // not those of the start: others may have saved and removed some since
  names.erase(newest);
  const auto whole = read_stored(storage, names).whole;
  for (size_t i = 0; i + static_cast<size_t>(count) <= whole.size(); ++i) {
    const auto& name = whole[i].second;
    if (!removal.remove(name + "/" + kIndexName)) continue; // first: from then on it is no checkpoint
    for (const auto& object : names.at(name).data) removal.remove(object);
  }
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
  const auto be_later_than = [this](int64_t other) {
    time_ = std::max(time_, std::min(other, std::numeric_limits<int64_t>::max() - 1) + 1);
  };
  replaces_ = storage_.size(object(kIndexName)).has_value();
  TORCH_CHECK(!replaces_ || options_.overwrite, name_,
              " exists already; a checkpoint is never changed (SaveOptions::overwrite replaces it)");
  if (replaces_) be_later_than(open_checkpoint(storage_, name_).index.saved_at);
  if (options_.keep_last > 0) {
    auto others = series_beside(storage_, name_);
    for (const auto& [name, objects] : others) be_later_than(objects.time);
    std::erase_if(others, [](const auto& each) { return !each.second.data.empty(); });
    for (const auto& [time, name] : read_stored(storage_, others).whole) be_later_than(time); // of values alone, without data
  }
  token_ = std::string(kDataStart) + std::to_string(time_) + "-" + std::to_string(::getpid()) + "-";
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
    Removal removal(storage_);
    auto stored = stored_under(storage_, name_ + "/");
    for (const auto& old : stored[name_].data) {
      if (!old.starts_with(object(token_))) removal.remove(old);
    }
    if (options_.keep_last > 0) keep_last(storage_, options_.keep_last, name_, removal);
    removal.finish();
  });
}

StorageSave::~StorageSave() {
  if (keeps_data_) return;
  for (const auto& object : made_) remove_quietly(storage_, object); // what stays is removed by the next save of the name
}

} // namespace tessera::internal

namespace tessera::checkpoint {

std::string latest(const Storage& storage, const std::string& prefix) {
  const auto [whole, damaged] = internal::read_stored(storage, internal::stored_under(storage, prefix));
  const auto newest = std::ranges::max_element(damaged, {}, &internal::DamagedIndex::time);
  TORCH_CHECK(newest == damaged.end() || (!whole.empty() && newest->time < whole.back().first), newest->error,
              "\nNo whole checkpoint beside it is newer; remove it, or name the one to load");
  return whole.empty() ? std::string() : whole.back().second;
}

} // namespace tessera::checkpoint
