#include <ATen/TensorGeometry.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <tessera/checkpoint/checksum.h>
#include <tessera/checkpoint/distcp.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/pickle.h>
#include <tessera/checkpoint/torch_archive.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace tessera::internal {

namespace {

constexpr int64_t kMaxMetadataBytes = int64_t{1} << 32;
// Values of a pickle may be shared, so what is made of them could outgrow it. Of chunks that are not shared, each takes more
// bytes.
constexpr size_t kLeastChunkBytes = 16;
constexpr size_t kMostRepeated = 64;

struct DtypeName {
  std::string_view name;    // "torch.float32"
  std::string_view storage; // "torch.FloatStorage"
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
        name, {}, dtype_of(entry, what), pickle_sizes(pickle_field(entry, "size", what), what), "distributed checkpoint", {}};
    const auto& chunks = pickle_items(pickle_field(entry, "chunks", what), what);
    listed_chunks_ += chunks.size();
    TORCH_CHECK(listed_chunks_ <= text_.size() / kLeastChunkBytes, what, " lists chunks that other tensors list too");
    for (const auto* chunk : chunks) {
      Box box{pickle_sizes(pickle_field(chunk, "offsets", what), what), pickle_sizes(pickle_field(chunk, "sizes", what), what)};
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
    const auto* known = std::ranges::find(kDtypeNames, name, &DtypeName::name);
    TORCH_CHECK(known != kDtypeNames.end(), what, " has the unknown dtype ", name);
    return known->dtype;
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
    TORCH_CHECK(!transforms || std::get_if<PickleNone>(transforms) || pickle_items(transforms, what).empty(), what,
                " is compressed, which is not supported");
    const auto found = positions_.find(name);
    try {
      if (found == positions_.end()) {
        TORCH_CHECK(value_names_.insert(name).second, "appears twice");
        add_value(name, location);
      } else {
        add_chunk(index_.tensors[found->second], pickle_sizes(pickle_field(key, "offset", what), what), location);
      }
    } catch (const c10::Error& error) { // those of the archive's reader do not say where
      TORCH_CHECK(false, (folder_ / location.file).string(), ": \"", name, "\": ", error.what_without_backtrace());
    }
  }

  // Items do not overlap, so what is made of them does not outgrow the files.
  std::shared_ptr<ArchivePart> item_at(const Location& location) {
    const auto position = static_cast<size_t>(position_of(location.file));
    auto item = std::make_shared<ArchivePart>(opened_[position], location.offset, location.length);
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
    const auto text = archive_record(archive, *item, "data.pkl", what);
    const Pickle pickle(text, what);
    if (auto value = state_value_of(pickle.root(), kMostRepeated * text.size()))
      index_.values.emplace_back(name, std::move(*value));
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
    TORCH_CHECK(!archive.hasRecord("byteorder") || archive_record(archive, *item, "byteorder", what) == "little", what,
                " is not little-endian");
    const auto text = archive_record(archive, *item, "data.pkl", what);
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
    const auto* known = std::ranges::find(kDtypeNames, dtype, &DtypeName::dtype);
    TORCH_CHECK(storage_class == known->storage, what, " is stored in ", storage_class, " and listed as ", known->name);
    TORCH_CHECK(pickle_sizes(arguments[2], what) == sizes, what, " is stored with another shape than listed");
    const auto strides = pickle_sizes(arguments[3], what);
    TORCH_CHECK(strides.size() == sizes.size(), what, " has ", strides.size(), " strides for ", sizes.size(), " dims");
    TORCH_CHECK(at::geometry_is_contiguous(sizes, strides), what, " is not stored in row-major order, which is not supported");
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

} // namespace tessera::internal
