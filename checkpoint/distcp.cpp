#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <tessera/checkpoint/checksum.h>
#include <tessera/checkpoint/distcp.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/pickle.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace tessera::checkpoint {

namespace {

constexpr int64_t kMaxMetadataBytes = int64_t{1} << 32;
// Values of a pickle may be shared, so what is made of them could outgrow it. Of chunks that are not shared, each takes more
// bytes.
constexpr size_t kLeastChunkBytes = 16;
constexpr size_t kMostDims = 64;
constexpr size_t kMostRepeated = 64;

struct DtypeName {
  const char* name;    // "torch.float32"
  const char* storage; // "torch.FloatStorage"
  at::ScalarType dtype;
};

constexpr std::array<DtypeName, 12> kDtypeNames{{
    {"torch.float64", "torch.DoubleStorage", at::kDouble},
    {"torch.float32", "torch.FloatStorage", at::kFloat},
    {"torch.float16", "torch.HalfStorage", at::kHalf},
    {"torch.bfloat16", "torch.BFloat16Storage", at::kBFloat16},
    {"torch.int64", "torch.LongStorage", at::kLong},
    {"torch.int32", "torch.IntStorage", at::kInt},
    {"torch.int16", "torch.ShortStorage", at::kShort},
    {"torch.int8", "torch.CharStorage", at::kChar},
    {"torch.uint8", "torch.ByteStorage", at::kByte},
    {"torch.bool", "torch.BoolStorage", at::kBool},
    {"torch.complex64", "torch.ComplexFloatStorage", at::kComplexFloat},
    {"torch.float8_e4m3fn", "torch.storage.UntypedStorage", at::kFloat8_e4m3fn},
}};

template <typename T>
const T* get(PickleRef value) {
  return std::get_if<T>(static_cast<const PickleValue::variant*>(value));
}

std::vector<int64_t> integers(PickleRef value, const std::string& what) {
  const auto& items = pickle_items(value, what);
  TORCH_CHECK(items.size() <= kMostDims, what, " has ", items.size(), " dims");
  std::vector<int64_t> numbers;
  for (const auto* item : items) {
    numbers.push_back(pickle_as<int64_t>(item, what));
    TORCH_CHECK(numbers.back() >= 0, what, " has a negative number");
  }
  return numbers;
}

// A part of a file that holds one zip archive, as torch.save writes it.
class Item : public caffe2::serialize::ReadAdapterInterface {
 public:
  Item(const File& file, int64_t offset, int64_t length) : file_(file), offset_(offset), length_(length) {
    TORCH_CHECK(offset <= file.size() && length <= file.size() - offset, file.path().string(), ": an item of ", length,
                " bytes at ", offset, " in a file of ", file.size());
  }
  size_t size() const override { return static_cast<size_t>(length_); }
  size_t read(uint64_t position, void* data, size_t bytes, const char* /*what*/) const override {
    if (position >= size()) return 0;
    const auto count = std::min<uint64_t>(bytes, size() - position);
    file_.read_at(data, count, offset_ + static_cast<int64_t>(position));
    return count;
  }

 private:
  const File& file_;
  int64_t offset_, length_;
};

// Where `.metadata` says that an item lies.
struct Location {
  std::string file;
  int64_t offset = 0, length = 0;
};

class DistcpIndexer {
 public:
  explicit DistcpIndexer(const std::filesystem::path& folder)
      : folder_(folder),
        source_((folder / kDistcpMetadata).string()),
        text_(read_file(folder / kDistcpMetadata, kMaxMetadataBytes)),
        pickle_(text_, source_) {}

  Index run() {
    index_.has_checksums = false;
    index_.checksum = checksum(text_);
    const auto root = pickle_.root();
    TORCH_CHECK(pickle_class(root) == "torch.distributed.checkpoint.metadata.Metadata", source_,
                ": not the metadata of a distributed checkpoint");
    for (const auto& [name, entry] : pickle_as<PickleDict>(pickle_field(root, "state_dict_metadata", source_), source_).items) {
      add_entry(pickle_as<std::string>(name, source_), entry);
    }
    for (const auto& [key, info] : pickle_as<PickleDict>(pickle_field(root, "storage_data", source_), source_).items)
      add_item(key, info);
    validate(index_, source_);
    return std::move(index_);
  }

 private:
  void add_entry(const std::string& name, PickleRef entry) {
    const auto what = source_ + ": tensor \"" + name + "\"";
    if (!pickle_class(entry).ends_with(".TensorStorageMetadata")) return;
    IndexedTensor tensor{
        name, {}, dtype_of(entry, what), integers(pickle_field(entry, "size", what), what), "distributed checkpoint", {}};
    const auto& chunks = pickle_items(pickle_field(entry, "chunks", what), what);
    listed_chunks_ += chunks.size();
    TORCH_CHECK(listed_chunks_ <= text_.size() / kLeastChunkBytes, what, " lists chunks that other tensors list too");
    for (const auto* chunk : chunks) {
      Box box{integers(pickle_field(chunk, "offsets", what), what), integers(pickle_field(chunk, "sizes", what), what)};
      TORCH_CHECK(fits(box, tensor.sizes), what, ": a chunk lies outside the shape ", at::IntArrayRef(tensor.sizes));
      auto [listed, is_new] = boxes_[name].try_emplace(box.offsets, box.sizes);
      if (!is_new && box.numel() > 0) listed->second = box.sizes; // an empty one may start at the same place
    }
    TORCH_CHECK(positions_.emplace(name, index_.tensors.size()).second, what, " appears twice");
    index_.tensors.push_back(std::move(tensor));
  }

  static at::ScalarType dtype_of(PickleRef entry, const std::string& what) {
    const auto* properties = pickle_field(entry, "properties", what);
    const auto& state = pickle_as<PickleTuple>(pickle_as<PickleObject>(properties, what).state, what).items;
    TORCH_CHECK(!state.empty(), what, " has no dtype");
    const auto& name = pickle_as<PickleName>(state[0], what).name;
    for (const auto& known : kDtypeNames) {
      if (name == known.name) return known.dtype;
    }
    TORCH_CHECK(false, what, " has the unknown dtype ", name);
  }

  void add_item(PickleRef key, PickleRef info) {
    const auto& name = pickle_as<std::string>(pickle_field(key, "fqn", source_), source_);
    const auto what = source_ + ": \"" + name + "\"";
    const Location location{pickle_as<std::string>(pickle_field(info, "relative_path", what), what),
                            pickle_as<int64_t>(pickle_field(info, "offset", what), what),
                            pickle_as<int64_t>(pickle_field(info, "length", what), what)};
    TORCH_CHECK(
        !location.file.empty() && location.file.find('/') == std::string::npos && location.offset >= 0 && location.length >= 0,
        what, " lies in no file of the folder");
    const auto* transforms = pickle_field(info, "transform_descriptors", what);
    TORCH_CHECK(!transforms || get<PickleNone>(transforms) || pickle_items(transforms, what).empty(), what,
                " is compressed, which is not supported");
    const auto found = positions_.find(name);
    try {
      if (found == positions_.end()) {
        TORCH_CHECK(value_names_.insert(name).second, "appears twice");
        add_value(name, location);
      } else {
        add_chunk(index_.tensors[found->second], integers(pickle_field(key, "offset", what), what), location);
      }
    } catch (const c10::Error& error) { // those of the archive's reader do not say where
      TORCH_CHECK(false, (folder_ / location.file).string(), ": \"", name, "\": ", error.what_without_backtrace());
    }
  }

  // Items do not overlap, so what is made of them does not outgrow the files.
  std::shared_ptr<Item> item_at(const Location& location) {
    const auto position = static_cast<size_t>(position_of(location.file));
    auto item = std::make_shared<Item>(opened_[position], location.offset, location.length);
    claimed_.resize(opened_.size());
    claimed_[position] += location.length;
    TORCH_CHECK(claimed_[position] <= opened_[position].size(), "the items of this file overlap");
    return item;
  }

  int64_t position_of(const std::string& file) {
    const auto [found, is_new] = files_.try_emplace(file, static_cast<int64_t>(index_.files.size()));
    if (is_new) {
      opened_.push_back(File::open(folder_ / file));
      index_.files.push_back({file, opened_.back().size(), 0, 0});
    }
    return found->second;
  }

  void add_value(const std::string& name, const Location& location) {
    const std::string what = "its item";
    const auto item = item_at(location);
    caffe2::serialize::PyTorchStreamReader archive(item);
    const auto text = record(archive, *item, "data.pkl", what);
    const Pickle pickle(text, what);
    if (auto value = value_of(pickle.root(), kMostRepeated * text.size())) index_.values.emplace_back(name, std::move(*value));
  }

  static std::string record(caffe2::serialize::PyTorchStreamReader& archive, const Item& item, const std::string& name,
                            const std::string& what) {
    // Its size is what the archive says, and torch.save does not compress.
    TORCH_CHECK(archive.getRecordSize(name) <= item.size(), what, ": ", name, " is larger than the archive that holds it");
    const auto [data, size] = archive.getRecord(name);
    return {static_cast<const char*>(data.get()), size};
  }

  template <typename T>
  static std::optional<StateValue> list_of(const std::vector<PickleRef>& items) {
    std::vector<T> values;
    for (const auto* item : items) {
      if (const auto* value = get<T>(item)) {
        values.push_back(*value);
      } else {
        return std::nullopt;
      }
    }
    return values;
  }

  // `limit`: how much text a list may hold; its items may be one and the same.
  static std::optional<StateValue> value_of(PickleRef root, size_t limit) {
    if (const auto* value = get<bool>(root)) return *value;
    if (const auto* value = get<int64_t>(root)) return *value;
    if (const auto* value = get<double>(root)) return *value;
    if (const auto* value = get<std::string>(root)) return *value;
    const auto* list = get<PickleList>(root);
    const auto* tuple = get<PickleTuple>(root);
    if (!list && !tuple) return std::nullopt;
    const auto& items = list ? list->items : tuple->items;
    if (auto values = list_of<int64_t>(items)) return values;
    if (auto values = list_of<double>(items)) return values;
    size_t bytes = 0;
    for (const auto* item : items) {
      const auto* text = get<std::string>(item);
      bytes += text ? text->size() : 0;
    }
    TORCH_CHECK(bytes <= limit, "a list holds ", bytes, " bytes of text, more than the pickle");
    return list_of<std::string>(items);
  }

  void add_chunk(IndexedTensor& tensor, const std::vector<int64_t>& offsets, const Location& location) {
    const std::string what = "its part at " + c10::str(at::IntArrayRef(offsets));
    const auto& boxes = boxes_[tensor.name];
    const auto found = boxes.find(offsets);
    TORCH_CHECK(found != boxes.end(), what, " is not among the tensor's chunks");
    const Box box{found->first, found->second};
    if (box.numel() == 0) return;
    const auto file = position_of(location.file);
    const auto item = item_at(location);
    caffe2::serialize::PyTorchStreamReader archive(item);
    TORCH_CHECK(!archive.hasRecord("byteorder") || record(archive, *item, "byteorder", what) == "little", what,
                " is not little-endian");
    const auto text = record(archive, *item, "data.pkl", what);
    const Pickle pickle(text, what);
    const auto stored = stored_tensor(pickle.root(), tensor.dtype, box.sizes, what);
    const auto bytes = box.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    TORCH_CHECK(stored.offset <= static_cast<int64_t>(archive.getRecordSize("data/" + stored.storage)) - bytes, what,
                ": its data is too short");
    const auto begin = static_cast<int64_t>(archive.getRecordOffset("data/" + stored.storage));
    tensor.chunks.push_back({box, file, location.offset + begin + stored.offset, {}});
  }

  struct StoredTensor {
    std::string storage; // its record in the archive
    int64_t offset = 0;  // bytes in it
  };

  // torch._utils._rebuild_tensor_v2(("storage", class, key, device, numel), offset, size, stride, …)
  static StoredTensor stored_tensor(PickleRef root, at::ScalarType dtype, const std::vector<int64_t>& sizes,
                                    const std::string& what) {
    TORCH_CHECK(pickle_class(root) == "torch._utils._rebuild_tensor_v2", what, " is stored as ", pickle_class(root),
                ", which is not supported");
    const auto& arguments = pickle_as<PickleTuple>(pickle_as<PickleObject>(root, what).arguments, what).items;
    TORCH_CHECK(arguments.size() >= 4, what, " is stored with too few arguments");
    const auto& storage = pickle_as<PickleTuple>(pickle_as<PicklePersistent>(arguments[0], what).id, what).items;
    TORCH_CHECK(storage.size() == 5, what, " has a storage that is not understood");
    const auto& storage_class = pickle_as<PickleName>(storage[1], what).name;
    const auto known =
        std::find_if(kDtypeNames.begin(), kDtypeNames.end(), [&](const DtypeName& name) { return name.dtype == dtype; });
    TORCH_CHECK(storage_class == known->storage, what, " is stored in ", storage_class, " and listed as ", known->name);
    TORCH_CHECK(integers(arguments[2], what) == sizes, what, " is stored with another shape than listed");
    const auto strides = integers(arguments[3], what);
    TORCH_CHECK(strides.size() == sizes.size(), what, " has ", strides.size(), " strides for ", sizes.size(), " dims");
    int64_t expected = 1;
    for (size_t d = sizes.size(); d-- > 0; expected *= sizes[d]) {
      TORCH_CHECK(sizes[d] <= 1 || strides[d] == expected, what, " is not stored in row-major order, which is not supported");
    }
    const auto offset = pickle_as<int64_t>(arguments[1], what);
    const auto item = static_cast<int64_t>(c10::elementSize(dtype));
    TORCH_CHECK(offset >= 0 && offset <= std::numeric_limits<int64_t>::max() / item, what, " starts at element ", offset);
    return {pickle_as<std::string>(storage[2], what), offset * item};
  }

  std::filesystem::path folder_;
  std::string source_, text_;
  Pickle pickle_;
  Index index_;
  std::unordered_map<std::string, size_t> positions_;                 // of tensors
  using Boxes = std::map<std::vector<int64_t>, std::vector<int64_t>>; // offsets → sizes
  std::unordered_map<std::string, Boxes> boxes_;                      // of tensors, as `.metadata` lists them
  size_t listed_chunks_ = 0;
  std::unordered_set<std::string> value_names_;
  std::map<std::string, int64_t> files_;
  std::deque<File> opened_;
  std::vector<int64_t> claimed_; // bytes of the items in each file
};

} // namespace

Index index_of_distcp(const std::filesystem::path& folder) { return DistcpIndexer(folder).run(); }

} // namespace tessera::checkpoint
