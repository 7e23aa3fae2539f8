// Accelerate's YAML as DeepSpeed's JSON.
#include <absl/strings/ascii.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>

#include <tessera/training/config/values/config_text.h>
#include <tessera/training/config/values/config_values.h>
#include <tessera/training/train_config.h>

namespace tessera {

namespace {

using internal::accelerate_keys;
using internal::ConfigKey;
using internal::Json;
using internal::KeyEffect;
using internal::KeyType;

/// The keys of a file, each block's with its prefix.
class AccelerateFile {
 public:
  AccelerateFile(const Json& root, std::string source, std::vector<std::string>& notes)
      : source_(std::move(source)), notes_(notes) {
    read(root, "");
  }

  bool has(const std::string& name) const { return values_.contains(name); }
  Json value(const std::string& name) const {
    return values_.contains(name) ? values_[name] : internal::standard_of(*find_key(accelerate_keys(), name));
  }
  bool boolean(const std::string& name) const { return value(name).get<bool>(); }
  int64_t integer(const std::string& name) const { return value(name).get<int64_t>(); }
  std::string text(const std::string& name) const { return value(name).get<std::string>(); }
  std::string where(const std::string& name) const { return source_ + ": " + name; }
  const std::string& source() const { return source_; }
  std::vector<std::string>& notes() { return notes_; }

 private:
  /// "fsdp_" in fsdp_config, "parallelism_config_" in parallelism_config.
  static std::string prefix_in(const std::string& block) {
    return block == "fsdp_config" ? "fsdp_" : block == "parallelism_config" ? "parallelism_config_" : "";
  }

  void read(const Json& block, const std::string& name) {
    for (const auto& [field, value] : block.items()) {
      const auto prefix = prefix_in(name);
      const auto full = name.empty() ? field : name + '.' + (field.starts_with(prefix) ? "" : prefix) + field;
      const auto* key = find_key(accelerate_keys(), full);
      TORCH_CHECK_VALUE(key, where(name.empty() ? field : name + '.' + field), " is an unknown key",
                        internal::nearest_name(field, internal::names_in(accelerate_keys(), name)));
      if (value.is_null()) continue;
      if (key->type == KeyType::kBlock) {
        read(internal::as_type(*key, value, where(full)), full);
      } else {
        add(*key, internal::as_type(*key, value, where(full)));
      }
    }
  }

  void add(const ConfigKey& key, const Json& value) {
    const std::string name(key.name);
    const bool is_empty = (value.is_string() && value.get<std::string>().empty()) || (value.is_array() && value.empty());
    const bool off = internal::is_off(key, value) || is_empty || value == "no";
    TORCH_CHECK_NOT_IMPLEMENTED(key.effect != KeyEffect::kMissing || off, where(name),
                                value.is_object() ? "" : " is " + internal::to_text(value) + ", which",
                                " is not here: ", key.here);
    if (key.effect == KeyEffect::kNone && !off) notes_.push_back(fmt::format("{} has no effect here: {}", name, key.here));
    values_[name] = value;
  }

  std::string source_;
  std::vector<std::string>& notes_;
  Json values_ = Json::object();
};

void add_precision(AccelerateFile& file, Json& config) {
  const auto value = file.value("mixed_precision");
  auto name = value.is_string() ? absl::AsciiStrToLower(value.get<std::string>()) : std::string(value == false ? "no" : "");
  if (!file.has("mixed_precision") && file.boolean("fp16")) name = "fp16";
  const bool is_deepspeed = file.value("distributed_type") == "DEEPSPEED";
  if (name == "bf16" && !is_deepspeed) config["tessera"]["precision"] = "bf16_mixed";
  if (name == "bf16" && is_deepspeed) config["bf16"] = {{"enabled", true}};
  if (name == "fp16" && is_deepspeed) config["fp16"] = {{"enabled", true}};
  if (name == "fp16" && !is_deepspeed) { // torch.amp.GradScaler's numbers
    config["fp16"] = {{"enabled", true}, {"loss_scale_window", 2000}, {"hysteresis", 1}};
    file.notes().emplace_back("mixed_precision fp16 has the loss scale of DeepSpeed, which grows one step later than PyTorch's");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(name != "fp8", file.where("mixed_precision"),
                              " is fp8, which no config turns on: take bf16, and call convert_to_float8 in the program");
  const bool is_known = name == "no" || name == "bf16" || name == "fp16";
  TORCH_CHECK_VALUE(is_known, file.where("mixed_precision"), " is ", internal::to_text(value), ", but must be no, bf16 or fp16");
}

/// The name of FSDP1's strategy, which both keys may give, also by its number.
std::string strategy_name(const AccelerateFile& file) {
  static const std::vector<std::string> names{"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"};
  const std::string of_strategy = "fsdp_config.fsdp_sharding_strategy", of_reshard = "fsdp_config.fsdp_reshard_after_forward";
  const auto version = file.integer("fsdp_config.fsdp_version");
  TORCH_CHECK_VALUE(version == 1 || version == 2, file.where("fsdp_config.fsdp_version"), " is ", version,
                    ", but must be 1 or 2");
  const auto& key = version == 2 || (!file.has(of_strategy) && file.has(of_reshard)) ? of_reshard : of_strategy;
  const auto value = file.value(key);
  if (value.is_null()) return names[0];
  if (version == 2 && (value.is_boolean() || value == "true" || value == "false"))
    return value == true || value == "true" ? "FULL_SHARD" : "SHARD_GRAD_OP";
  if (version == 1 && value.is_number_integer() && value >= 1 && value <= names.size()) return names[value.get<size_t>() - 1];
  const auto name = value.is_string() ? absl::AsciiStrToUpper(value.get<std::string>()) : "";
  const bool is_known = version == 1 && std::find(names.begin(), names.end(), name) != names.end();
  TORCH_CHECK_VALUE(is_known, file.where(key), " is ", internal::to_text(value), ", but must be ",
                    version == 2 ? "true or false in version 2" : "the name of a strategy", internal::nearest_name(name, names));
  return name;
}

void add_fsdp(AccelerateFile& file, Json& config) {
  const auto strategy = strategy_name(file);
  const bool is_sharded = strategy != "NO_SHARD", is_hybrid = strategy.starts_with("HYBRID");
  auto &zero = config["zero_optimization"], &own = config["tessera"];
  zero["stage"] = is_sharded ? 3 : 0;
  if (strategy == "SHARD_GRAD_OP" || strategy == "HYBRID_SHARD_ZERO2") own["reshard_after_forward"] = false;
  const auto machines = file.integer("num_machines");
  if (is_hybrid && machines > 1 && !file.has("parallelism_config.parallelism_config_dp_replicate_size"))
    own["mesh"] = {{"replicate", machines}, {"shard", -1}};
  if (file.boolean("fsdp_config.fsdp_offload_params")) {
    TORCH_CHECK_NOT_IMPLEMENTED(is_sharded, file.where("fsdp_config.fsdp_offload_params"),
                                " is true with NO_SHARD, which is not here");
    zero["offload_optimizer"] = zero["offload_param"] = {{"device", "cpu"}};
  }
  if (file.boolean("fsdp_config.fsdp_activation_checkpointing")) own["recompute"] = true;
  if (file.boolean("fsdp_config.fsdp_cpu_ram_efficient_loading") || file.boolean("fsdp_config.fsdp_sync_module_states"))
    own["initial_weights"] = "broadcast";
}

void add_mesh(const AccelerateFile& file, Json& config) {
  const std::vector<std::pair<std::string, std::string>> dims{
      {"dp_replicate", "replicate"}, {"dp_shard", "shard"}, {"cp", "cp"}, {"tp", "tp"}};
  Json mesh = Json::object();
  int64_t ranks = 1;
  for (const auto& [theirs, ours] : dims) {
    const auto key = "parallelism_config.parallelism_config_" + theirs + "_size";
    const auto size = file.integer(key);
    TORCH_CHECK_VALUE(size >= 1, file.where(key), " is ", size, ", but must be positive");
    if (file.has(key)) mesh[ours] = size;
    ranks *= size;
  }
  if (mesh.empty()) return;
  const auto processes = file.value("num_processes");
  TORCH_CHECK_VALUE(processes.is_null() || processes == ranks, file.where("parallelism_config"), " makes ", ranks,
                    " ranks, but num_processes is ", internal::to_text(processes));
  if (!mesh.contains("shard")) mesh["shard"] = 1;
  config["tessera"]["mesh"] = mesh;
}

void add_deepspeed(const AccelerateFile& file, Json& config) {
  const std::string block = "deepspeed_config.";
  auto& zero = config["zero_optimization"];
  zero["stage"] = file.integer(block + "zero_stage");
  config["gradient_accumulation_steps"] = file.value(block + "gradient_accumulation_steps");
  config["gradient_clipping"] = file.value(block + "gradient_clipping");
  for (const std::string what : {"offload_optimizer", "offload_param"}) {
    const auto device = file.text(block + what + "_device"), path = file.text(block + what + "_nvme_path");
    if (device == "none") continue;
    zero[what]["device"] = device;
    if (path != "none") zero[what]["nvme_path"] = path;
  }
}

} // namespace

std::string config_from_accelerate(const std::string& yaml_as_json, const std::string& source, std::vector<std::string>& notes) {
  AccelerateFile file(internal::parse_json(yaml_as_json, source), source, notes);
  const auto type = absl::AsciiStrToUpper(file.has("distributed_type") ? file.text("distributed_type") : "");
  TORCH_CHECK_VALUE(!type.empty(), file.where("distributed_type"), " is not given");
  const std::vector<std::string> replicas{"NO", "MULTI_GPU", "MULTI_CPU"};
  const bool is_replicated = std::find(replicas.begin(), replicas.end(), type) != replicas.end();
  TORCH_CHECK_NOT_IMPLEMENTED(is_replicated || type == "FSDP" || type == "DEEPSPEED", file.where("distributed_type"), " is ",
                              type, ", which is not here: FSDP, DEEPSPEED, MULTI_GPU, MULTI_CPU or NO");
  Json config{{"train_micro_batch_size_per_gpu", "auto"}, {"gradient_clipping", 0.0}};
  if (type == "DEEPSPEED") {
    add_deepspeed(file, config);
  } else {
    notes.emplace_back("gradient_clipping is 0: Accelerate clips where the program calls it");
  }
  add_precision(file, config);
  if (type == "FSDP") add_fsdp(file, config);
  add_mesh(file, config);
  constexpr int kIndent = 2;
  return config.dump(kIndent) + "\n";
}

} // namespace tessera
