#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/formats/archived_tensor.h>
#include <tessera/checkpoint/formats/torch_archive.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

namespace tessera::internal {

namespace {

constexpr size_t kMostDepth = 64;

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

size_t bytes_in(const std::string& text) { return sizeof(std::string) + text.size(); }
template <typename T>
size_t bytes_in(const T& /*number*/) {
  return sizeof(T);
}
template <typename T>
size_t bytes_in(const std::vector<T>& values) {
  size_t bytes = 0;
  for (const auto& value : values) bytes += bytes_in(value);
  return bytes;
}

const std::vector<PickleRef>* items_of(PickleRef value) {
  if (const auto* list = std::get_if<PickleList>(value)) return &list->items;
  const auto* tuple = std::get_if<PickleTuple>(value);
  return tuple ? &tuple->items : nullptr;
}

// What a StateValue of it takes at least, without a look at a list's items.
size_t least_bytes_of(PickleRef value) {
  const auto* items = items_of(value);
  const auto* text = std::get_if<std::string>(value);
  return items ? sizeof(int64_t) * items->size() : text ? bytes_in(*text) : sizeof(int64_t);
}

class TorchFileIndexer {
 public:
  explicit TorchFileIndexer(const std::filesystem::path& path)
      : source_(path.string()),
        file_(File::open(path)),
        archive_(std::make_shared<ArchivePart>(file_, 0, file_.size()), source_),
        text_(archive_.read("data.pkl")),
        pickle_(text_, source_),
        most_bytes_(kMostRepeated * text_.size()) {
    index_.files.push_back({path.filename().string(), file_.size(), 0, 0});
  }

  Index run() {
    index_.has_checksums = false;
    index_.checksum = checksum(text_);
    TORCH_CHECK(!archive_.has("byteorder") || archive_.read("byteorder") == "little", source_, " is not little-endian");
    add(pickle_.root(), "", 0);
    validate(index_, source_);
    return std::move(index_);
  }

 private:
  void add(PickleRef value, const std::string& name, size_t depth) {
    name_bytes_ += name.size() + 1;
    TORCH_CHECK(name_bytes_ <= most_bytes_, source_, ": \"", name, "\" is among values that many others hold");
    TORCH_CHECK(depth <= kMostDepth, source_, ": \"", name, "\" is nested too deep");
    const auto type = pickle_class(value);
    if (const auto* dict = std::get_if<PickleDict>(value)) return add_items(*dict, name, depth);
    if (type.starts_with("__torch__.")) {
      const auto* state = std::get<PickleObject>(*value).state;
      return add_items(pickle_as<PickleDict>(state, source_ + ": \"" + name + "\""), name, depth);
    }
    if (type.starts_with("torch._utils._rebuild_parameter")) return add_parameter(value, name, depth);
    if (type.starts_with("torch._utils._rebuild_tensor")) return add_tensor(value, name);
    if (!name.empty()) add_value(without_tag(value), name);
  }

  void add_value(PickleRef value, const std::string& name) {
    const auto least = least_bytes_of(value);
    if (value_bytes_ + least > most_bytes_) return; // many others hold it too
    auto plain = state_value_of(value, most_bytes_ - value_bytes_);
    // Also where it is none: a long list was gone through, which many may hold.
    value_bytes_ += plain ? std::visit([](const auto& held) { return bytes_in(held); }, *plain) : least;
    if (plain) index_.values.emplace_back(name, std::move(*plain));
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

  // _rebuild_parameter(tensor, requires_grad, hooks), or the same with a state behind.
  void add_parameter(PickleRef value, const std::string& name, size_t depth) {
    const auto what = source_ + ": \"" + name + "\"";
    const auto& arguments = pickle_as<PickleTuple>(pickle_as<PickleObject>(value, what).arguments, what).items;
    TORCH_CHECK(!arguments.empty(), what, " is a parameter without a tensor");
    add(arguments[0], name, depth + 1);
  }

  void add_tensor(PickleRef value, const std::string& name) {
    const auto what = source_ + ": \"" + name + "\"";
    const auto stored = archived_tensor(value, what);
    IndexedTensor tensor{name, {}, stored.dtype, stored.sizes, "torch file", {}};
    if (stored.bytes > 0) tensor.chunks.push_back({whole(stored.sizes), 0, data_begin(archive_, stored, what), {}});
    index_.tensors.push_back(std::move(tensor));
  }

  std::string source_;
  File file_;
  Archive archive_;
  std::string text_;
  Pickle pickle_;
  Index index_;
  const size_t most_bytes_; // of all names, and of all values
  size_t name_bytes_ = 0, value_bytes_ = 0;
};

// By which torch.load knows files without a zip archive, and what `save_torch` writes before its archive.
constexpr std::string_view kMagicNumber = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20";
constexpr size_t kMostBeforeMagicNumber = 11; // the pickle's protocol, and from protocol 4 on the size of a frame

std::string begin_of(const std::filesystem::path& path) {
  const auto file = File::open(path);
  const auto most = static_cast<int64_t>(kMostBeforeMagicNumber + kMagicNumber.size());
  std::string begin(static_cast<size_t>(std::min(file.size(), most)), '\0');
  file.read_at(begin.data(), begin.size(), 0);
  return begin;
}

bool is_without_archive(const std::string& begin) {
  constexpr char kProtocol = '\x80';
  return begin.starts_with(kProtocol) && begin.find(kMagicNumber) != std::string::npos;
}

} // namespace

std::optional<StateValue> state_value_of(PickleRef root, size_t limit) {
  if (const auto* value = std::get_if<bool>(root)) return *value;
  if (const auto* value = std::get_if<int64_t>(root)) return *value;
  if (const auto* value = std::get_if<double>(root)) return *value;
  if (const auto* value = std::get_if<std::string>(root)) return *value;
  const auto* items = items_of(root);
  if (!items) return std::nullopt;
  if (auto values = list_of<int64_t>(*items)) return values;
  if (auto values = list_of_numbers(*items)) return values;
  size_t bytes = 0;
  for (const auto* item : *items) {
    const auto* text = std::get_if<std::string>(item);
    bytes += text ? bytes_in(*text) : 0;
  }
  if (bytes > limit) return std::nullopt;
  return list_of<std::string>(*items);
}

bool is_torch_file(const std::filesystem::path& path) {
  const auto begin = begin_of(path);
  return begin.starts_with("PK\x03\x04") || begin.starts_with(kMagicNumber) || is_without_archive(begin);
}

Index index_of_torch_file(const std::filesystem::path& path) {
  TORCH_CHECK(
      !is_without_archive(begin_of(path)), path.string(), " was written without a zip archive (by torch.save with ",
      "_use_new_zipfile_serialization=False, or before PyTorch 1.6), which is not read: load it in Python and save it again");
  try {
    return TorchFileIndexer(path).run();
  } catch (const c10::Error& error) { // some do not say where
    const std::string text = error.what_without_backtrace();
    TORCH_CHECK(false, text.starts_with(path.string()) ? "" : path.string() + ": ", text);
  }
}

} // namespace tessera::internal
