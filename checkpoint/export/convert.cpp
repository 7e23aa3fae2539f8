#include <ATen/ops/empty.h>
#include <tessera/checkpoint/export/convert.h>
#include <tessera/checkpoint/export/export_names.h>
#include <tessera/checkpoint/export/formats.h>
#include <tessera/checkpoint/formats/reader.h>

#include <algorithm>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

namespace tessera::internal {

namespace {

bool is_excluded(const std::string& name, const std::vector<std::string>& prefixes) {
  return std::ranges::any_of(prefixes, [&](const std::string& prefix) { return name.starts_with(prefix); });
}

// Names without the excluded ones. The ranks' own values of a tensor go where it goes, and are called after it.
class KeptNames {
 public:
  KeptNames(const Index& index, const std::vector<std::string>& exclude) : exclude_(exclude) {
    for (const auto& tensor : index.tensors) {
      Holding what{tensor.name, tensor.aliases};
      taken_.insert(what.name);
      taken_.insert(what.aliases.begin(), what.aliases.end());
      if (tensor.copy.of.empty() && filter(what)) kept_[tensor.name] = what.name;
    }
    for (const auto& value : index.values) taken_.insert(value.first);
    for (const auto& tensor : index.tensors) {
      const auto found = tensor.copy.of.empty() ? kept_.end() : kept_.find(tensor.copy.of);
      if (found == kept_.end()) continue;
      const bool keeps_name = found->second == tensor.copy.of;
      if (!keeps_name || !is_excluded(tensor.name, exclude_)) kept_[tensor.name] = name_of_copy(tensor, found->second);
    }
  }

  // False where nothing of it is kept.
  bool apply(Holding& what) const {
    if (what.copy.of.empty()) return filter(what);
    const auto found = kept_.find(what.name);
    if (found == kept_.end()) return false;
    what.copy.of = kept_.at(what.copy.of);
    what.name = found->second;
    return true;
  }

 private:
  bool filter(Holding& what) const {
    return filter_names(what, [&](const std::string& name) { return !is_excluded(name, exclude_); });
  }

  // One that is free, as a save gives it.
  std::string name_of_copy(const IndexedTensor& copy, const std::string& kept) {
    if (kept == copy.copy.of) return copy.name;
    auto name = kept;
    do name += ".rank" + std::to_string(copy.copy.rank);
    while (!taken_.insert(name).second);
    return name;
  }

  const std::vector<std::string>& exclude_;
  std::set<std::string> taken_;
  std::unordered_map<std::string, std::string> kept_; // of each tensor that is kept, by the name in the checkpoint
};

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
  auto& left_out = result.left_out;
  const KeptNames kept(index, options.exclude);
  for (const auto& tensor : index.tensors) {
    Holding what{tensor.name, tensor.aliases, tensor.dtype, tensor.sizes, tensor.layout, "", {}, tensor.copy};
    if (!kept.apply(what)) continue;
    if (options.format != Format::kTessera) left_out.insert(left_out.end(), what.aliases.begin(), what.aliases.end());
    if (!tensor.copy.of.empty() && options.format != Format::kTessera) {
      left_out.push_back(tensor.name);
      continue;
    }
    result.plan.tensors.push_back({std::move(what), {{whole(tensor.sizes), 0}}});
    result.sources.push_back(&tensor);
  }
  for (const auto& value : index.values) {
    if (is_excluded(value.first, options.exclude)) continue;
    if (options.format == Format::kTessera) {
      result.plan.values.push_back(value);
    } else {
      left_out.push_back(value.first);
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
  Reader reader(from.source, from.index, options.verify && from.index.has_checksums);
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
