#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/checkpoint/boxes/pieces.h>
#include <tessera/checkpoint/boxes/runs.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/bytes/parallel.h>
#include <tessera/checkpoint/formats/safetensors.h>
#include <tessera/checkpoint/save/writer.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>

namespace tessera::internal {

namespace {

// The disk is set to work after so many.
constexpr std::ptrdiff_t kBlocksAtOnce = 8;
constexpr int64_t kCopiedBytes = int64_t{16} << 20;

// `parts[k]` are those of file k: the k-th box that this rank writes of each tensor.
std::vector<std::vector<OwnedPart>> parts_by_file(const std::vector<OwnedPart>& parts) {
  std::vector<std::vector<OwnedPart>> files;
  size_t file = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    file = i > 0 && parts[i].tensor == parts[i - 1].tensor ? file + 1 : 0;
    if (file == files.size()) files.emplace_back();
    files[file].push_back(parts[i]);
  }
  return files;
}

std::string file_name(int rank, size_t file, size_t files) {
  return fmt::format("shard-{:05}-model-{:05}-of-{:05}.safetensors", rank + 1, file + 1, files);
}

// The header with the keys that PyTorch's distributed checkpoint looks for.
SafetensorsHeader header_of(const std::vector<OwnedPart>& parts, bool own) {
  SafetensorsHeader header;
  auto offsets = Json::object();
  for (const auto& part : parts) {
    header.tensors.push_back({part.what->name, part.what->dtype, part.box.sizes});
    offsets[part.what->name] = {{"saved_offsets", part.box.offsets}};
  }
  header.metadata = {{"DCP_SHARDING_INFO", dump_json(offsets, "DCP_SHARDING_INFO")}, {"DCP_VERSION", "1.0"}, {"format", "pt"}};
  if (own) header.metadata[kOwnKey] = "1";
  return header;
}

// The disk works while the next blocks are summed and copied.
std::vector<uint64_t> write_data(File& file, const at::Tensor& data, int64_t begin) {
  const auto* bytes = static_cast<const char*>(data.const_data_ptr());
  const auto total = static_cast<int64_t>(data.nbytes());
  std::vector<uint64_t> checksums(static_cast<size_t>(block_count(total, kBlockBytes)));
  const auto blocks = std::ssize(checksums);
  for_each_in_parallel((blocks + kBlocksAtOnce - 1) / kBlocksAtOnce, [&](int64_t group) {
    const auto first = group * kBlocksAtOnce, last = std::min(blocks, first + kBlocksAtOnce);
    for (auto block = first; block < last; ++block) {
      const auto offset = block * kBlockBytes;
      const auto size = static_cast<size_t>(std::min(kBlockBytes, total - offset));
      checksums[static_cast<size_t>(block)] = checksum(bytes + offset, size);
      file.write_at(bytes + offset, size, begin + offset);
    }
    file.start_flush(begin + first * kBlockBytes, (last - first) * kBlockBytes);
  });
  return checksums;
}

class FolderFile : public PartFile {
 public:
  explicit FolderFile(const std::filesystem::path& path) : file_(File::create(path)) {}
  void write_prefix(std::string_view prefix) override { file_.write_at(prefix.data(), prefix.size(), 0); }
  std::vector<uint64_t> write_tensor(const at::Tensor& tensor, int64_t begin) override {
    return write_data(file_, tensor, begin);
  }
  void close() override { file_.sync_and_close(); }

 private:
  File file_;
};

} // namespace

NewFiles files_in(const std::filesystem::path& folder) {
  return {[folder](const std::string& name) { return std::make_unique<FolderFile>(folder / name); }, ""};
}

Json to_json(const Written& written) {
  auto files = Json::array(), chunks = Json::array();
  for (const auto& file : written.files) files.push_back(to_json(file));
  for (const auto& [tensor, chunk] : written.chunks) chunks.push_back({tensor, to_json(chunk)});
  return {{"files", std::move(files)}, {"chunks", std::move(chunks)}};
}

Written written_from_json(const JsonView& json) {
  Written written;
  for (const auto& file : json["files"].elements()) written.files.push_back(file_from_json(file));
  for (const auto& chunk : json["chunks"].elements()) {
    written.chunks.emplace_back(chunk.elements().at(0).non_negative(), chunk_from_json(chunk.elements().at(1)));
  }
  return written;
}

std::vector<OwnedPart> parts_of(const SavePlan& plan, int rank, const Snapshot& snapshot) {
  std::unordered_map<std::string, size_t> positions;
  for (size_t i = 0; i < snapshot.state.tensors.size(); ++i) positions.emplace(snapshot.state.tensors[i].name, i);
  std::vector<OwnedPart> parts;
  for (size_t t = 0; t < plan.tensors.size(); ++t) {
    const auto& [what, assignments] = plan.tensors[t];
    for (const auto& assignment : assignments) {
      if (assignment.rank != rank) continue;
      const auto position = positions.at(what.copy.of.empty() ? what.name : what.copy.of);
      const auto& boxes = snapshot.state.tensors[position].boxes;
      const auto held = std::find(boxes.begin(), boxes.end(), assignment.box);
      TORCH_INTERNAL_ASSERT(held != boxes.end() || assignment.box.numel() == 0);
      auto data =
          held != boxes.end() ? snapshot.data[position][held - boxes.begin()] : at::empty(assignment.box.sizes, what.dtype);
      parts.push_back({static_cast<int64_t>(t), &what, assignment.box, [data] { return data; }});
    }
  }
  return parts;
}

void write_into_whole(File& file, const OwnedPart& part, at::ScalarType dtype, int64_t begin, const RunVisitor& visit) {
  const auto source = part.data();
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  const bool direct = is_plain_memory(source) && source.scalar_type() == dtype;
  const auto write = [&](const Box& box, const at::Tensor& data) {
    const auto* bytes = static_cast<const char*>(data.const_data_ptr());
    for_each_run(box, box, whole(part.what->sizes), [&](int64_t from, int64_t to, int64_t length) {
      visit(bytes + from * item, length * item, begin + to * item);
      file.write_at(bytes + from * item, static_cast<size_t>(length * item), begin + to * item);
    });
  };
  try {
    if (source.numel() == 0) return;
    if (direct) return write(part.box, source);
    for (const auto& box : split(part.box, item, kCopiedBytes)) {
      Box local = box;
      for (size_t d = 0; d < local.offsets.size(); ++d) local.offsets[d] -= part.box.offsets[d];
      write(box, narrow(source, local).resolve_conj().resolve_neg().to(at::kCPU, dtype).contiguous());
    }
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "tensor \"", part.what->name, "\": ", error.what_without_backtrace());
  }
}

Written write_parts(const std::vector<OwnedPart>& owned, int rank, const NewFiles& new_files, bool own) {
  Written written;
  auto files = parts_by_file(owned);
  for (size_t i = 0; i < files.size(); ++i) {
    auto& parts = files[i];
    // Widest dtype first, so that every tensor lies aligned for readers that map the file.
    std::stable_sort(parts.begin(), parts.end(), [](const OwnedPart& a, const OwnedPart& b) {
      return c10::elementSize(a.what->dtype) > c10::elementSize(b.what->dtype);
    });
    const auto name = new_files.name_prefix + file_name(rank, i, files.size());
    auto header = header_of(parts, own);
    const auto prefix = encode_safetensors(header, name);
    const auto file = new_files.create(name);
    file->write_prefix(prefix);
    for (size_t p = 0; p < parts.size(); ++p) {
      const auto begin = header.tensors[p].begin;
      const auto data = parts[p].data().resolve_conj().resolve_neg().contiguous().cpu();
      Chunk chunk{parts[p].box, static_cast<int64_t>(i), begin, file->write_tensor(data, begin)};
      written.chunks.emplace_back(parts[p].tensor, std::move(chunk));
    }
    const auto end = header.tensors.empty() ? header.data_begin : header.tensors.back().end;
    written.files.push_back({name, end, header.data_begin, checksum(prefix)});
    file->close();
  }
  return written;
}

} // namespace tessera::internal
