#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/convert.h>
#include <tessera/checkpoint/formats.h>
#include <tessera/checkpoint/reader.h>

#include <algorithm>
#include <memory>

namespace tessera::checkpoint {

namespace {

bool is_excluded(const std::string& name, const std::vector<std::string>& prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(), [&](const std::string& prefix) { return name.starts_with(prefix); });
}

int64_t bytes_of(const IndexedTensor& tensor) {
  return whole(tensor.sizes).numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

} // namespace

int64_t data_bytes(const Index& index) {
  int64_t bytes = 0;
  for (const auto& tensor : index.tensors) bytes += bytes_of(tensor);
  return bytes;
}

std::vector<std::string> convert(const Opened& from, const std::filesystem::path& to, const ConvertOptions& options) {
  Reader reader(from.folder, from.index, options.verify && from.index.has_checksums);
  SavePlan plan;
  std::vector<const IndexedTensor*> sources;
  for (const auto& tensor : from.index.tensors) {
    if (is_excluded(tensor.name, options.exclude)) continue;
    plan.tensors.push_back(
        {{tensor.name, tensor.aliases, tensor.dtype, tensor.sizes, tensor.layout, true, {}}, {{whole(tensor.sizes), 0}}});
    sources.push_back(&tensor);
  }
  std::vector<std::string> left_out;
  for (const auto& value : from.index.values) {
    if (is_excluded(value.first, options.exclude)) continue;
    if (options.format == Format::kTessera) {
      plan.values.push_back(value);
    } else {
      left_out.push_back(value.first);
    }
  }
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
  SaveOptions save_options;
  save_options.overwrite = options.hugging_face.overwrite;
  save_options.update_latest = false;
  SaveSession session(ranks, to, save_options);
  if (options.format == Format::kTessera) write_tessera(session, plan, parts);
  if (options.format == Format::kDistributed) write_distributed(session, parts);
  if (options.format == Format::kHuggingFace) write_hugging_face(session, plan, parts, options.hugging_face);
  return left_out;
}

} // namespace tessera::checkpoint
