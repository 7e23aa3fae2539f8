#include <tessera/plan/models/weights.h>

#include <absl/strings/match.h>
#include <absl/strings/strip.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include <tessera/base/listing.h>
#include <tessera/checkpoint/formats/open.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/plan/models/transformer.h>

namespace tessera::internal::models {

namespace {

using Sizes = std::vector<int64_t>;

/// Adds those of the experts one by one, and the router under its name there.
void add_mixture(std::vector<FileTensor>& tensors, const std::string& path, const std::string& part, const Sizes& sizes) {
  if (part == "router.weight") return tensors.push_back({path + ".gate.weight", sizes});
  static const std::map<std::string, std::string> kNames{{"experts.gate", "w1"}, {"experts.up", "w3"}, {"experts.down", "w2"}};
  for (int64_t i = 0; i < sizes[0]; ++i)
    tensors.push_back({c10::str(path, ".experts.", i, ".", kNames.at(part), ".weight"), {sizes[1], sizes[2]}});
}

bool is_weight_of_linear(const TransformerConfig& config, const std::string& name) {
  const auto& names = config.block_names;
  return std::ranges::any_of(std::vector{names.packed, names.output, names.up, names.down},
                             [&](const auto& path) { return absl::EndsWith(name, "." + path + ".weight"); });
}

/// What files have beside the parameters of the model.
bool is_ignored(const TransformerConfig& config, const std::string& name) {
  for (const auto* ending : {".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "embeddings.position_ids"}) {
    if (absl::EndsWith(name, ending)) return true;
  }
  if (config.is_tied && (name == config.names.head + ".weight" || name == "cls.predictions.decoder.weight")) return true;
  if (config.head == Head::kPooled) return absl::StartsWith(name, "cls.");
  if (config.head != Head::kMasked) return false;
  return absl::StartsWith(name, "cls.seq_relationship.") || absl::StrContains(name, "pooler.") ||
         name == "cls.predictions.decoder.bias";
}

/// A name as the model has it.
std::string known_name(const std::map<std::string, Sizes>& wanted, const TransformerConfig& config, std::string name) {
  if (absl::EndsWith(name, "LayerNorm.gamma")) name.replace(name.size() - 5, 5, "weight");
  if (absl::EndsWith(name, "LayerNorm.beta")) name.replace(name.size() - 4, 4, "bias");
  const auto without = std::string(absl::StripPrefix(name, config.prefix));
  for (const auto& each : {name, config.prefix + name, without}) {
    if (wanted.contains(each)) return each;
  }
  return name;
}

std::string text_of(const Sizes& sizes) { return c10::str(at::IntArrayRef(sizes)); }

} // namespace

std::vector<FileTensor> file_tensors(const TransformerConfig& config) {
  const auto model = on_meta([&] { return Transformer(config); });
  std::vector<FileTensor> tensors;
  const auto& mixture = config.block_names.mixture;
  for (const auto& item : model->named_parameters()) {
    const auto& name = item.key();
    auto sizes = item.value().sizes().vec();
    const auto at = mixture.empty() ? std::string::npos : name.find("." + mixture + ".");
    if (at != std::string::npos) {
      const auto path = name.substr(0, at + 1 + mixture.size());
      add_mixture(tensors, path, name.substr(path.size() + 1), sizes);
      continue;
    }
    if (config.packs_transposed && is_weight_of_linear(config, name)) std::ranges::reverse(sizes);
    tensors.push_back({name, std::move(sizes)});
  }
  return tensors;
}

bool has_weights(const std::filesystem::path& folder) { return !safetensors_files_in(folder).empty(); }

void check_weights(const TransformerConfig& config, const std::filesystem::path& folder) {
  std::map<std::string, Sizes> wanted;
  for (auto& tensor : file_tensors(config)) wanted.emplace(std::move(tensor.name), std::move(tensor.sizes));
  std::vector<std::string> problems;
  auto missing = wanted;
  for (const auto& tensor : open_checkpoint(folder).index.tensors) {
    const auto name = known_name(wanted, config, tensor.name);
    const auto found = wanted.find(name);
    if (found == wanted.end()) {
      if (!is_ignored(config, tensor.name)) problems.push_back("'" + tensor.name + "', which the model does not have");
      continue;
    }
    missing.erase(name);
    if (tensor.sizes != found->second)
      problems.push_back(c10::str("'", tensor.name, "' has the shape ", text_of(tensor.sizes), ", but the model's has ",
                                  text_of(found->second)));
  }
  for (const auto& [name, sizes] : missing) problems.push_back("'" + name + "' " + text_of(sizes) + " is missing");
  TORCH_CHECK_VALUE(problems.empty(), folder.string(), ": the weights are not those of the ", config.architecture,
                    " that config.json describes:", listing(problems));
}

} // namespace tessera::internal::models
