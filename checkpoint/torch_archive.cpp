#include <ATen/TensorGeometry.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/checksum.h>
#include <tessera/checkpoint/torch_archive.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <memory>
#include <utility>

namespace tessera::internal {

namespace {

using caffe2::serialize::PyTorchStreamReader;

constexpr size_t kMostDepth = 64;
constexpr size_t kMostRepeated = 64; // values of a pickle may be shared, so what is made of them could outgrow it
constexpr std::array kStorageDtypes{at::kByte,
                                    at::kChar,
                                    at::kShort,
                                    at::kInt,
                                    at::kLong,
                                    at::kHalf,
                                    at::kFloat,
                                    at::kDouble,
                                    at::kBFloat16,
                                    at::kBool,
                                    at::kComplexFloat,
                                    at::kUInt16,
                                    at::kUInt32,
                                    at::kUInt64,
                                    at::kFloat8_e4m3fn,
                                    at::kFloat8_e5m2,
                                    at::kFloat8_e4m3fnuz,
                                    at::kFloat8_e5m2fnuz,
                                    at::kFloat8_e8m0fnu};

// Of "torch.FloatStorage".
at::ScalarType dtype_of(const std::string& storage_class, const std::string& what) {
  const auto* found = std::ranges::find_if(
      kStorageDtypes, [&](at::ScalarType dtype) { return storage_class == c10::str("torch.", c10::toString(dtype), "Storage"); });
  TORCH_CHECK(found != kStorageDtypes.end(), what, " is stored in ", storage_class, ", which is not supported");
  return *found;
}

// Of "torch.uint16".
at::ScalarType dtype_named(const std::string& name, const std::string& what) {
  const auto lower = [](std::string text) {
    std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text;
  };
  const auto* found =
      std::ranges::find_if(kStorageDtypes, [&](at::ScalarType dtype) { return name == "torch." + lower(c10::toString(dtype)); });
  TORCH_CHECK(found != kStorageDtypes.end(), what, " has the dtype ", name, ", which is not supported");
  return *found;
}

template <typename T>
std::optional<StateValue> list_of(const std::vector<PickleRef>& items) {
  std::vector<T> values;
  for (const auto* item : items) {
    const auto* value = std::get_if<T>(item);
    if (!value) return std::nullopt;
    values.push_back(*value);
  }
  return values;
}

// Integers among them are numbers too: (0, 0.999).
std::optional<StateValue> list_of_numbers(const std::vector<PickleRef>& items) {
  std::vector<double> values;
  for (const auto* item : items) {
    const auto* value = std::get_if<double>(item);
    const auto* integer = std::get_if<int64_t>(item);
    if (!value && !integer) return std::nullopt;
    values.push_back(value ? *value : static_cast<double>(*integer));
  }
  return values;
}

// What a call that LibTorch makes of a list was given; any other value as it is.
PickleRef without_tag(PickleRef value) {
  if (!pickle_class(value).starts_with("torch.jit._pickle.")) return value;
  const auto* arguments = std::get_if<PickleTuple>(std::get<PickleObject>(*value).arguments);
  return arguments && !arguments->items.empty() ? arguments->items[0] : value;
}

class TorchFileIndexer {
 public:
  explicit TorchFileIndexer(const std::filesystem::path& path)
      : source_(path.string()),
        file_(File::open(path)),
        part_(std::make_shared<ArchivePart>(file_, 0, file_.size())),
        archive_(part_),
        text_(archive_record(archive_, *part_, "data.pkl", source_)),
        pickle_(text_, source_) {
    index_.files.push_back({path.filename().string(), file_.size(), 0, 0});
  }

  Index run() {
    index_.has_checksums = false;
    index_.checksum = checksum(text_);
    TORCH_CHECK(!archive_.hasRecord("byteorder") || archive_record(archive_, *part_, "byteorder", source_) == "little", source_,
                " is not little-endian");
    add(pickle_.root(), "", 0);
    validate(index_, source_);
    return std::move(index_);
  }

 private:
  void add(PickleRef value, const std::string& name, size_t depth) {
    names_bytes_ += name.size() + 1;
    TORCH_CHECK(depth <= kMostDepth && names_bytes_ <= kMostRepeated * text_.size(), source_, ": \"", name,
                "\" is nested too deep, or among values that many others hold");
    const auto type = pickle_class(value);
    if (const auto* dict = std::get_if<PickleDict>(value)) return add_items(*dict, name, depth);
    if (type.starts_with("__torch__.")) {
      const auto* state = std::get<PickleObject>(*value).state;
      return add_items(pickle_as<PickleDict>(state, source_ + ": \"" + name + "\""), name, depth);
    }
    if (type.starts_with("torch._utils._rebuild_tensor")) return add_tensor(value, name);
    if (auto plain = state_value_of(without_tag(value), kMostRepeated * text_.size()); plain && !name.empty())
      index_.values.emplace_back(name, std::move(*plain));
  }

  void add_items(const PickleDict& dict, const std::string& name, size_t depth) {
    for (const auto& [key, value] : dict.items) {
      const auto* number = std::get_if<int64_t>(key);
      const auto* text = std::get_if<std::string>(key);
      if (!number && !text) continue;
      const auto part = text ? *text : std::to_string(*number);
      add(value, name.empty() ? part : name + "." + part, depth + 1);
    }
  }

  void add_tensor(PickleRef value, const std::string& name) {
    const auto what = source_ + ": \"" + name + "\"";
    const auto& arguments = pickle_as<PickleTuple>(pickle_as<PickleObject>(value, what).arguments, what).items;
    const bool names_dtype = pickle_class(value) == "torch._utils._rebuild_tensor_v3"; // after the hooks
    TORCH_CHECK(names_dtype ? arguments.size() >= 7 : pickle_class(value).ends_with("_v2") && arguments.size() >= 4, what,
                " is stored as ", pickle_class(value), ", which is not supported");
    const auto& storage = pickle_as<PickleTuple>(pickle_as<PicklePersistent>(arguments[0], what).id, what).items;
    TORCH_CHECK(storage.size() >= 5, what, " has a storage that is not understood");
    const auto dtype = names_dtype ? dtype_named(pickle_as<PickleName>(arguments[6], what).name, what)
                                   : dtype_of(pickle_as<PickleName>(storage[1], what).name, what);
    const auto sizes = pickle_sizes(arguments[2], what), strides = pickle_sizes(arguments[3], what);
    TORCH_CHECK(strides.size() == sizes.size() && at::geometry_is_contiguous(sizes, strides), what,
                " is not stored in row-major order, which is not supported");
    IndexedTensor tensor{name, {}, dtype, sizes, "torch file", {}};
    const auto bytes = checked_bytes(sizes, dtype);
    TORCH_CHECK(bytes, what, " is too large");
    if (*bytes > 0) {
      const auto record = "data/" + pickle_as<std::string>(storage[2], what);
      const auto first = pickle_as<int64_t>(arguments[1], what), held = static_cast<int64_t>(archive_.getRecordSize(record));
      const auto item = static_cast<int64_t>(c10::elementSize(dtype));
      TORCH_CHECK(first >= 0 && *bytes <= held && first <= (held - *bytes) / item, what, ": its data is too short");
      const auto begin = static_cast<int64_t>(archive_.getRecordOffset(record)) + first * item;
      tensor.chunks.push_back({whole(sizes), 0, begin, {}});
    }
    index_.tensors.push_back(std::move(tensor));
  }

  std::string source_;
  File file_;
  std::shared_ptr<ArchivePart> part_;
  PyTorchStreamReader archive_;
  std::string text_;
  Pickle pickle_;
  Index index_;
  size_t names_bytes_ = 0;
};

} // namespace

ArchivePart::ArchivePart(const File& file, int64_t offset, int64_t length) : file_(file), offset_(offset), length_(length) {
  TORCH_CHECK(offset <= file.size() && length <= file.size() - offset, file.path().string(), ": an item of ", length,
              " bytes at ", offset, " in a file of ", file.size());
}

size_t ArchivePart::read(uint64_t position, void* data, size_t bytes, const char* /*what*/) const {
  if (position >= size()) return 0;
  const auto count = std::min<uint64_t>(bytes, size() - position);
  file_.read_at(data, count, offset_ + static_cast<int64_t>(position));
  return count;
}

std::string archive_record(PyTorchStreamReader& archive, const ArchivePart& part, const std::string& name,
                           const std::string& what) {
  // Its size is what the archive says, and torch.save does not compress.
  TORCH_CHECK(archive.getRecordSize(name) <= part.size(), what, ": ", name, " is larger than the archive that holds it");
  const auto [data, size] = archive.getRecord(name);
  return {static_cast<const char*>(data.get()), size};
}

std::optional<StateValue> state_value_of(PickleRef root, size_t limit) {
  if (const auto* value = std::get_if<bool>(root)) return *value;
  if (const auto* value = std::get_if<int64_t>(root)) return *value;
  if (const auto* value = std::get_if<double>(root)) return *value;
  if (const auto* value = std::get_if<std::string>(root)) return *value;
  const auto* list = std::get_if<PickleList>(root);
  const auto* tuple = std::get_if<PickleTuple>(root);
  if (!list && !tuple) return std::nullopt;
  const auto& items = list ? list->items : tuple->items;
  if (auto values = list_of<int64_t>(items)) return values;
  if (auto values = list_of_numbers(items)) return values;
  size_t bytes = 0;
  for (const auto* item : items) {
    const auto* text = std::get_if<std::string>(item);
    bytes += text ? text->size() : 0;
  }
  TORCH_CHECK(bytes <= limit, "a list holds ", bytes, " bytes of text, more than the pickle");
  return list_of<std::string>(items);
}

bool is_torch_file(const std::filesystem::path& path) {
  constexpr std::string_view kZip = "PK\x03\x04", kLegacy = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20";
  const auto file = File::open(path);
  std::string begin(static_cast<size_t>(std::min<int64_t>(file.size(), std::ssize(kLegacy))), '\0');
  file.read_at(begin.data(), begin.size(), 0);
  return begin.starts_with(kZip) || begin == kLegacy;
}

Index index_of_torch_file(const std::filesystem::path& path) {
  try {
    return TorchFileIndexer(path).run();
  } catch (const c10::Error& error) { // those of the archive's reader do not say where
    const std::string text = error.what_without_backtrace();
    TORCH_CHECK(false, text.starts_with(path.string()) ? "" : path.string() + ": ", text);
  }
}

} // namespace tessera::internal
