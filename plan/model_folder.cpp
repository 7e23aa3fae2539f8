#include <tessera/plan/model_folder.h>

#include <c10/util/Exception.h>

#include <algorithm>

#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/bytes/json.h>
#include <tessera/plan/models/layers_config.h>
#include <tessera/plan/models/plan_transformer.h>
#include <tessera/plan/models/read_config.h>
#include <tessera/plan/models/weights.h>

namespace tessera {

namespace {

namespace fs = std::filesystem;
constexpr int64_t kMostBytes = 64 << 20; ///< of a config
constexpr int64_t kUsualPositions = 2048;

fs::path config_of(const fs::path& path) {
  TORCH_CHECK_VALUE(fs::exists(path), "read_model: there is no ", path.string());
  if (!fs::is_directory(path)) return path;
  auto file = path / "config.json";
  TORCH_CHECK_VALUE(fs::exists(file), "read_model: the folder ", path.string(), " has no config.json");
  return file;
}

/// The folder's name, or that of a file with another name than folders have.
std::string name_of(const fs::path& file, const std::string& architecture) {
  const auto folder = fs::weakly_canonical(file).parent_path().filename().string();
  if (file.filename() != "config.json") return file.stem().string();
  return folder.empty() ? architecture : folder;
}

int64_t sequence_of(const internal::models::TransformerConfig& config, int64_t asked, const std::string& source) {
  if (config.takes_pictures()) return config.length(0);
  TORCH_CHECK_VALUE(asked >= 0, source, ": a sequence of ", asked, " positions");
  TORCH_CHECK_VALUE(config.positions == 0 || asked <= config.positions, source, ": a sequence of ", asked,
                    " positions, but the model has ", config.positions);
  return asked > 0 ? asked : std::min(config.most_positions, kUsualPositions);
}

} // namespace

PlannedModel read_model(const std::filesystem::path& path, const ModelOptions& options) {
  namespace models = internal::models;
  const auto file = config_of(path);
  const auto json = internal::parse_json(internal::read_file(file, kMostBytes), file.string());
  const internal::JsonView view(json, file.string());
  TORCH_CHECK_VALUE(options.fused_norms || !models::is_layers_config(view), file.string(),
                    ": a file of layers has fused norms alone; write others in a program");
  TORCH_CHECK_VALUE(options.fused_attention || !models::is_layers_config(view), file.string(),
                    ": a file of layers has fused attention alone; write another one in a program");
  if (models::is_layers_config(view)) return models::plan_layers(view, options.sequence, options.dropout);
  auto config = models::read_transformer(view);
  config.name = name_of(file, config.architecture);
  if (!options.dropout) config.block.dropout = config.block.attention_dropout = 0;
  config.block.fuses_attention = options.fused_attention;
  if (!options.fused_norms && config.block.norm == models::NormKind::kRms) config.block.norm = models::NormKind::kPlainRms;
  if (options.checks_weights && fs::is_directory(path) && models::has_weights(path)) models::check_weights(config, path);
  return models::plan_transformer(config, sequence_of(config, options.sequence, file.string()));
}

std::vector<std::string> model_architectures() { return internal::models::transformer_architectures(); }

} // namespace tessera
