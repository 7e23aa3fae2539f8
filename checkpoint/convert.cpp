#include <ATen/ops/empty.h>
#include <tessera/checkpoint/convert.h>
#include <tessera/checkpoint/formats.h>
#include <tessera/checkpoint/reader.h>

#include <algorithm>

namespace tessera::internal {

namespace {

bool is_excluded(const std::string& name, const std::vector<std::string>& prefixes) {
  return std::ranges::any_of(prefixes, [&](const std::string& prefix) { return name.starts_with(prefix); });
}

int64_t bytes_of(const IndexedTensor& tensor) {
  return whole(tensor.sizes).numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

// What of a checkpoint is written, and where it is read.
struct Conversion {
  SavePlan plan;
  std::vector<const IndexedTensor*> sources; // of the plan's tensors
  std::vector<std::string> left_out;         // names that the format cannot hold
};

Conversion plan_conversion(const Index& index, const ConvertOptions& options) {
  Conversion result;
  for (const auto& tensor : index.tensors) {
    if (is_excluded(tensor.name, options.exclude)) continue;
    if (!tensor.copy.of.empty() && options.format != Format::kTessera) {
      result.left_out.push_back(tensor.name);
      continue;
    }
    result.plan.tensors.push_back({{tensor.name, tensor.aliases, tensor.dtype, tensor.sizes, tensor.layout, "", {}, tensor.copy},
                                   {{whole(tensor.sizes), 0}}});
    result.sources.push_back(&tensor);
  }
  for (const auto& value : index.values) {
    if (is_excluded(value.first, options.exclude)) continue;
    if (options.format == Format::kTessera) {
      result.plan.values.push_back(value);
    } else {
      result.left_out.push_back(value.first);
    }
  }
  return result;
}

} // namespace

int64_t data_bytes(const Index& index) {
  int64_t bytes = 0;
  for (const auto& tensor : index.tensors) bytes += bytes_of(tensor);
  return bytes;
}

std::vector<std::string> convert(const Opened& from, const std::filesystem::path& to, const ConvertOptions& options) {
  Reader reader(from.place, from.index, options.verify && from.index.has_checksums);
  auto [plan, sources, left_out] = plan_conversion(from.index, options);
  std::vector<OwnedPart> parts;
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto read = [&reader, &options, source = sources[i]] {
      const Piece piece{whole(source->sizes), at::empty(source->sizes, source->dtype)};
      reader.read(*source, piece);
      options.progress(bytes_of(*source));
      return piece.data;
    };
    parts.push_back({static_cast<int64_t>(i), &plan.tensors[i].what, whole(sources[i]->sizes), read});
  }
  const Ranks ranks;
  SaveSession session(ranks, to, {.overwrite = options.hugging_face.overwrite, .update_latest = false});
  if (options.format == Format::kTessera) write_tessera(session, plan, parts);
  if (options.format == Format::kDistributed) write_distributed(session, parts);
  if (options.format == Format::kHuggingFace) write_hugging_face(session, plan, parts, options.hugging_face);
  return left_out;
}

} // namespace tessera::internal
