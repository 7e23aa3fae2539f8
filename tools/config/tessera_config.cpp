// Shows what a config of DeepSpeed's does here, and converts Accelerate's.
#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <absl/flags/usage.h>
#include <absl/flags/usage_config.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/base/error_text.h>
#include <tessera/base/text_table.h>
#include <tessera/training/config/keys/config_key.h>
#include <tessera/training/train_config.h>

#include <iostream>
#include <optional>

#include "memory.h"
#include "yaml.h"

using OptionalInteger = std::optional<int64_t>;
using OptionalNumber = std::optional<double>;
using OptionalText = std::optional<std::string>;
using OptionalBoolean = std::optional<bool>;

ABSL_FLAG(int64_t, ranks, 1, "check: ranks of the job");
ABSL_FLAG(int64_t, parameters, 0, "check: predict the memory of a model with so many parameters");
ABSL_FLAG(int64_t, blocks, 24, "check: with --parameters: in so many equal blocks");
ABSL_FLAG(OptionalText, model, std::nullopt, "check: predict the memory of the model in this checkpoint or Hugging Face folder");
ABSL_FLAG(OptionalInteger, micro_batch_size, std::nullopt, "fills \"auto\": rows of a forward");
ABSL_FLAG(OptionalInteger, accumulation_steps, std::nullopt, "fills \"auto\": micro-batches of a step");
ABSL_FLAG(OptionalNumber, max_grad_norm, std::nullopt, "fills \"auto\": of the clipping");
ABSL_FLAG(OptionalNumber, learning_rate, std::nullopt, "fills \"auto\": of the optimizer, and after the warm-up");
ABSL_FLAG(OptionalNumber, weight_decay, std::nullopt, "fills \"auto\": of the optimizer");
ABSL_FLAG(OptionalNumber, adam_beta1, std::nullopt, "fills \"auto\": of the optimizer, with --adam_beta2");
ABSL_FLAG(OptionalNumber, adam_beta2, std::nullopt, "fills \"auto\": of the optimizer, with --adam_beta1");
ABSL_FLAG(OptionalNumber, adam_epsilon, std::nullopt, "fills \"auto\": of the optimizer");
ABSL_FLAG(OptionalInteger, warmup_steps, std::nullopt, "fills \"auto\": of the schedule");
ABSL_FLAG(OptionalInteger, total_steps, std::nullopt, "fills \"auto\": of the schedule");
ABSL_FLAG(OptionalBoolean, fp16, std::nullopt, "fills \"auto\": whether fp16 is enabled");
ABSL_FLAG(OptionalBoolean, bf16, std::nullopt, "fills \"auto\": whether bf16 is enabled");

namespace {

constexpr const char* kUsage = R"(tessera-config COMMAND [FILE]

  check FILE    what a DeepSpeed config does: its values, where they are from, and what each key means here; what has no effect,
                and why; with --parameters or --model, the memory of a rank. --ranks is the job's. Status 1 for a config that
                cannot be used, with the key and the reason
  resolve FILE  the config with all that the arguments fill in, as it is saved with each checkpoint
  convert FILE  a config of that kind from the YAML of `accelerate config`
  keys          the table of DeepSpeed's keys and of our own, in Markdown; `keys accelerate`: that of Accelerate's)";

tessera::TrainArguments arguments() {
  return {.ranks = absl::GetFlag(FLAGS_ranks),
          .micro_batch_size = absl::GetFlag(FLAGS_micro_batch_size),
          .accumulation_steps = absl::GetFlag(FLAGS_accumulation_steps),
          .max_grad_norm = absl::GetFlag(FLAGS_max_grad_norm),
          .learning_rate = absl::GetFlag(FLAGS_learning_rate),
          .weight_decay = absl::GetFlag(FLAGS_weight_decay),
          .adam_beta1 = absl::GetFlag(FLAGS_adam_beta1),
          .adam_beta2 = absl::GetFlag(FLAGS_adam_beta2),
          .adam_epsilon = absl::GetFlag(FLAGS_adam_epsilon),
          .warmup_steps = absl::GetFlag(FLAGS_warmup_steps),
          .total_steps = absl::GetFlag(FLAGS_total_steps),
          .fp16 = absl::GetFlag(FLAGS_fp16),
          .bf16 = absl::GetFlag(FLAGS_bf16)};
}

std::string mesh_text(const tessera::TrainConfig& config) {
  std::string text;
  for (const auto& [dim, size] : config.sharding.mesh) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", dim, size);
  return text;
}

void print_summary(const tessera::TrainConfig& config) {
  const auto& batch = config.batch;
  fmt::print("{} ranks: {}; strategy {}; precision {}\n", absl::GetFlag(FLAGS_ranks), mesh_text(config),
             tessera::row_of(config.sharding.strategy).name, config.precision.name);
  fmt::print("{} rows a step: micro-batches of {}, {} of them on each rank\n\n", batch.train, batch.micro, batch.accumulation);
}

void print_table(const tessera::TrainConfig& config) {
  std::vector<tessera::internal::TextRow> rows{{"key", "value", "from", "here"}};
  for (const auto& line : config.lines()) rows.push_back({line.key, line.value, line.origin, std::string(line.here)});
  fmt::print("{}", tessera::internal::text_table(rows));
  for (const auto& note : config.notes) fmt::print("{}note: {}\n", &note == config.notes.data() ? "\n" : "", note);
}

bool is_counted(const tessera::OptimizerConfig& optimizer) {
  return !std::holds_alternative<tessera::AdafactorOptions>(optimizer) &&
         !std::holds_alternative<tessera::AdamW8bitOptions>(optimizer);
}

void print_remarks(const tessera::TrainConfig& config) {
  const bool is_offloaded = config.sharding.offload.memory != tessera::OffloadPolicy::Memory::kDevice;
  fmt::print("without activations{}\n", is_offloaded ? "; what is offloaded is counted as if it were on the device" : "");
  if (!config.has_optimizer()) fmt::print("without an optimizer's state: the config has no optimizer\n");
  if (!is_counted(config.optimizer)) fmt::print("without the optimizer's state, see docs/optimizers.md\n");
  for (const auto& [dim, size] : config.sharding.mesh) {
    if (dim == "tp" || dim == "pp") fmt::print("{} splits the model further, which is not counted\n", dim);
  }
}

void print_memory(const tessera::MemoryPrediction& memory) {
  const bool is_small = memory.peak < int64_t{1} << 30;
  const auto* unit = is_small ? "MiB" : "GiB";
  std::vector<tessera::internal::TextRow> rows{{"memory of a rank", unit}};
  const auto add = [&](const std::string& what, int64_t bytes) {
    if (bytes > 0) rows.push_back({what, fmt::format("{:.2f}", static_cast<double>(bytes) / (is_small ? 1 << 20 : 1 << 30))});
  };
  add("parameters", memory.parameters);
  add("optimizer state", memory.optimizer_state);
  add("gradients", memory.gradients);
  add("gathered parameters", memory.unsharded);
  add("reductions", memory.reduce_buffers);
  add("freed blocks", memory.cached);
  add("temporaries", memory.temporaries);
  add("peak, in the " + memory.peak_at, memory.peak);
  fmt::print("\n{}", tessera::internal::text_table(rows, {unit}));
}

int check(const std::string& path) {
  const auto config = tessera::TrainConfig::read(path, arguments());
  print_summary(config);
  print_table(config);
  const auto parameters = absl::GetFlag(FLAGS_parameters);
  const auto model = absl::GetFlag(FLAGS_model);
  TORCH_CHECK(parameters == 0 || !model, "--parameters and --model are both given");
  if (parameters == 0 && !model) return 0;
  const auto shapes = model ? tools::shapes_in(*model) : tools::shapes_of_blocks(parameters, absl::GetFlag(FLAGS_blocks));
  print_memory(tools::predict(config, shapes, absl::GetFlag(FLAGS_ranks)));
  print_remarks(config);
  return 0;
}

int resolve(const std::string& path) {
  fmt::print("{}\n", tessera::TrainConfig::read(path, arguments()).resolved());
  return 0;
}

int convert(const std::string& path) {
  std::vector<std::string> notes;
  const auto config = tessera::config_from_accelerate(tools::json_of_yaml(path), path, notes);
  for (const auto& note : notes) fmt::print(stderr, "note: {}\n", note);
  fmt::print("{}", config);
  return 0;
}

int keys(const std::string& whose) {
  TORCH_CHECK(whose.empty() || whose == "accelerate", "keys takes no word but accelerate, and not ", whose);
  if (whose == "accelerate") {
    fmt::print("{}", tessera::internal::markdown_table(tessera::internal::accelerate_keys()));
    return 0;
  }
  fmt::print("{}\n{}", tessera::internal::markdown_table(tessera::internal::deepspeed_keys()),
             tessera::internal::markdown_table(tessera::internal::tessera_keys()));
  return 0;
}

int run(const std::vector<char*>& words) {
  TORCH_CHECK(words.size() > 1, "no command given (see --help)");
  const std::string command = words[1];
  if (command == "keys" && words.size() == 2) return keys("");
  const bool is_known = command == "check" || command == "resolve" || command == "convert" || command == "keys";
  TORCH_CHECK(is_known, "unknown command: ", command,
              tessera::internal::nearest_name(command, {"check", "resolve", "convert", "keys"}), " (see --help)");
  TORCH_CHECK(words.size() == 3, command, " takes one file (see --help)");
  if (command == "keys") return keys(words[2]);
  if (command == "check") return check(words[2]);
  return command == "resolve" ? resolve(words[2]) : convert(words[2]);
}

} // namespace

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(kUsage);
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) { return file.find("tessera_config") != absl::string_view::npos; };
  absl::SetFlagsUsageConfig(usage);
  const auto words = absl::ParseCommandLine(argc, argv);
  try {
    return run(words);
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera-config: {}\n", tessera::internal::error_text(error));
    return 1;
  }
}
