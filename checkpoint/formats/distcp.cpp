#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/bytes/pickle.h>
#include <tessera/checkpoint/formats/archived_tensor.h>
#include <tessera/checkpoint/formats/distcp.h>
#include <tessera/checkpoint/formats/torch_archive.h>

#include <map>
#include <unordered_map>
#include <unordered_set>

namespace tessera::internal {

namespace {

constexpr int64_t kMaxMetadataBytes = int64_t{1} << 32;
// Values of a pickle may be shared, so what is made of them could outgrow it. Of chunks that are not shared, each takes more
// bytes.
constexpr size_t kLeastChunkBytes = 16;

// The place of an item, as `.metadata` says.
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
    return dtype_from_python(pickle_as<PickleName>(state[0], what).name, what);
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
    } catch (const c10::Error& error) { // they do not say where
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
    Archive archive(item_at(location), what);
    const auto text = archive.read("data.pkl");
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
    Archive archive(item_at(location), what);
    TORCH_CHECK(!archive.has("byteorder") || archive.read("byteorder") == "little", what, " is not little-endian");
    const auto text = archive.read("data.pkl");
    const Pickle pickle(text, what);
    const auto stored = archived_tensor(pickle.root(), what);
    TORCH_CHECK(stored.dtype == tensor.dtype, what, " is stored as ", c10::toString(stored.dtype), " and listed as ",
                c10::toString(tensor.dtype));
    TORCH_CHECK(stored.sizes == box.sizes, what, " is stored with another shape than listed");
    tensor.chunks.push_back({box, file, location.offset + data_begin(archive, stored, what), {}});
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
