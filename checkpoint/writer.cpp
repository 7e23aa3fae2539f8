#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/checksum.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/pieces.h>
#include <tessera/checkpoint/safetensors.h>
#include <tessera/checkpoint/writer.h>

#include <algorithm>

namespace tessera::checkpoint {

namespace {

// A box to write and where its data is.
struct Part {
  int64_t tensor; // position in the plan
  const Holding* what;
  Piece piece;
};

// `parts[k]` are those of file k: the k-th box that this rank writes of each tensor.
std::vector<std::vector<Part>> parts_by_file(const SavePlan& plan, int rank, const StateDict& state) {
  std::vector<std::vector<Part>> files;
  for (size_t t = 0; t < plan.tensors.size(); ++t) {
    const auto& [what, assignments] = plan.tensors[t];
    if (std::none_of(assignments.begin(), assignments.end(), [&](const Assignment& a) { return a.rank == rank; })) continue;
    const auto& tensor = state.tensor(what.name);
    auto pieces = pieces_of(what.name, tensor);
    size_t file = 0;
    for (const auto& assignment : assignments) {
      if (assignment.rank != rank) continue;
      const auto held =
          std::find_if(pieces.begin(), pieces.end(), [&](const Piece& piece) { return piece.box == assignment.box; });
      auto piece = held != pieces.end() ? *held : Piece{assignment.box, at::empty(assignment.box.sizes, what.dtype)};
      TORCH_INTERNAL_ASSERT(held != pieces.end() || assignment.box.numel() == 0);
      if (file == files.size()) files.emplace_back();
      files[file++].push_back({static_cast<int64_t>(t), &what, std::move(piece)});
    }
  }
  return files;
}

std::string file_name(int rank, size_t file, size_t files) {
  const auto padded = [](size_t number) {
    const auto digits = std::to_string(number);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  };
  return "shard-" + padded(static_cast<size_t>(rank) + 1) + "-model-" + padded(file + 1) + "-of-" + padded(files) +
         ".safetensors";
}

// The header with the keys that PyTorch's distributed checkpoint looks for.
SafetensorsHeader header_of(const std::vector<Part>& parts) {
  SafetensorsHeader header;
  auto offsets = Json::object();
  for (const auto& part : parts) {
    header.tensors.push_back({part.what->name, part.what->dtype, part.piece.box.sizes});
    offsets[part.what->name] = {{"saved_offsets", part.piece.box.offsets}};
  }
  header.metadata = {{"DCP_SHARDING_INFO", dump_json(offsets, "DCP_SHARDING_INFO")}, {"DCP_VERSION", "1.0"}, {"format", "pt"}};
  return header;
}

// Writes a tensor's elements in row-major order, and returns the checksum of each block.
std::vector<uint64_t> write_data(File& file, const at::Tensor& tensor) {
  const auto data = tensor.resolve_conj().resolve_neg().contiguous().cpu();
  const auto* bytes = static_cast<const char*>(data.const_data_ptr());
  std::vector<uint64_t> checksums;
  const auto total = static_cast<int64_t>(data.nbytes());
  for (int64_t begin = 0; begin < total; begin += kBlockBytes) {
    const auto size = static_cast<size_t>(std::min(kBlockBytes, total - begin));
    checksums.push_back(checksum(bytes + begin, size));
    file.write(bytes + begin, size);
  }
  return checksums;
}

} // namespace

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

Written write_parts(const SavePlan& plan, int rank, const StateDict& state, const std::filesystem::path& folder) {
  Written written;
  auto files = parts_by_file(plan, rank, state);
  for (size_t i = 0; i < files.size(); ++i) {
    auto& parts = files[i];
    // Widest dtype first, so that every tensor lies aligned for readers that map the file.
    std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
      return c10::elementSize(a.what->dtype) > c10::elementSize(b.what->dtype);
    });
    const auto name = file_name(rank, i, files.size());
    auto header = header_of(parts);
    const auto prefix = encode_safetensors(header, name);
    auto file = File::create(folder / name);
    file.write(prefix);
    for (size_t p = 0; p < parts.size(); ++p) {
      Chunk chunk{parts[p].piece.box, static_cast<int64_t>(i), header.tensors[p].begin, write_data(file, parts[p].piece.data)};
      written.chunks.emplace_back(parts[p].tensor, std::move(chunk));
    }
    written.files.push_back({name, file.size(), header.data_begin, checksum(prefix)});
    file.sync_and_close();
  }
  return written;
}

} // namespace tessera::checkpoint
