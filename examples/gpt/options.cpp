#include "gpt/options.h"

#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <absl/flags/usage.h>
#include <absl/flags/usage_config.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

ABSL_FLAG(std::string, data, ".data/text.txt", "text file to train on; its last twentieth is for validation");
ABSL_FLAG(int64_t, layers, 4, "blocks of the model");
ABSL_FLAG(int64_t, width, 128, "features of a token; a multiple of --heads");
ABSL_FLAG(int64_t, heads, 4, "attention heads");
ABSL_FLAG(int64_t, sequence, 64, "bytes of context");
ABSL_FLAG(int64_t, steps, 600, "optimizer steps");
ABSL_FLAG(int64_t, batch, 4, "sequences a rank and step");
ABSL_FLAG(int64_t, global_batch, 0,
          "sequences a step over all ranks, in place of --batch: the loss curve then does not depend on the ranks");
ABSL_FLAG(double, lr, 5e-3, "highest learning rate (AdamW)");
ABSL_FLAG(int64_t, warmup, 40, "steps of linear warm-up; then the learning rate follows a cosine down to a tenth");
ABSL_FLAG(double, clip, 1.0, "largest global gradient norm; 0 for none");
ABSL_FLAG(double, weight_decay, 0.1, "of matrices; norms and biases have none");
ABSL_FLAG(uint64_t, seed, 1, "of the initial weights, the batches and the samples");
ABSL_FLAG(double, max_seconds, 0, "stop training after so many seconds; 0 for never");
ABSL_FLAG(int32_t, ranks, 0, "local ranks to start; 0: the environment (torchrun, Slurm, mpirun) says what rank this process is");
ABSL_FLAG(std::string, mesh, "",
          "shape of the device mesh, such as 4 or 2x2; default: one dim, for hybrid 2 x half of the ranks");
ABSL_FLAG(std::string, device, "cpu", "cpu or cuda");
ABSL_FLAG(int32_t, threads, 0, "threads a rank; 0: OMP_NUM_THREADS, or else the cores divided by the local ranks");
ABSL_FLAG(std::string, strategy, "full",
          "full, hybrid (replicate x shard), no-shard, or none (one process, nothing of Tessera's)");
ABSL_FLAG(std::string, layout, "ragged", "of the parameters in a group's buffers: ragged or per-parameter");
ABSL_FLAG(std::string, precision, "fp32", "of forward and backward: fp32 or bf16 (the sharded parameters stay fp32)");
ABSL_FLAG(std::string, reduce_precision, "fp32", "of the gradient reduction under --precision bf16: fp32 or bf16");
ABSL_FLAG(std::string, reshard_after_forward, "auto",
          "free a block's parameters between forward and backward: true, false, or auto");
ABSL_FLAG(std::string, log, "runs/train_gpt.jsonl", "file for the metrics, one JSON object a line; empty for none");
ABSL_FLAG(std::string, samples, "runs/samples.txt", "file for the text sampled at the end; empty for none");
ABSL_FLAG(int64_t, validate_every, 100, "steps between validations; 0: only at the end");
ABSL_FLAG(int64_t, validation_batches, 8, "batches of a validation; 0 for no validation");
ABSL_FLAG(int64_t, sample_bytes, 256, "length of the sampled text");
ABSL_FLAG(std::string, prompt, "It is a truth ", "what the sampled text begins with");
ABSL_FLAG(std::string, checkpoint, "", "folder for checkpoints, one folder step-<n> in it each; empty for none");
ABSL_FLAG(int64_t, save_every, 0, "steps between checkpoints; 0: only after the last step");
ABSL_FLAG(int32_t, keep_last, 0, "checkpoints to keep, older ones are removed; 0 for all");
ABSL_FLAG(bool, resume, false, "go on from the newest checkpoint in --checkpoint, if there is one");
ABSL_FLAG(std::string, dump_initial, "",
          "folder for the initial weights and the batches of all steps, for another program to train on");

namespace gpt {
namespace {

template <typename T>
using Choices = std::vector<std::pair<const char*, T>>;

const Choices<Strategy> kStrategies{
    {"full", Strategy::kFull}, {"hybrid", Strategy::kHybrid}, {"no-shard", Strategy::kNoShard}, {"none", Strategy::kNone}};
const Choices<Precision> kPrecisions{{"fp32", Precision::kFp32}, {"bf16", Precision::kBf16}};
const Choices<tessera::BufferLayout> kLayouts{{"ragged", tessera::BufferLayout::kRagged},
                                              {"per-parameter", tessera::BufferLayout::kPerParameter}};
const Choices<torch::DeviceType> kDevices{{"cpu", torch::kCPU}, {"cuda", torch::kCUDA}};
const Choices<std::optional<bool>> kReshard{{"auto", std::nullopt}, {"true", true}, {"false", false}};

template <typename T>
T choose(const char* flag, const std::string& text, const Choices<T>& choices) {
  std::string known;
  for (const auto& [name, value] : choices) {
    if (text == name) return value;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  TORCH_CHECK(false, "--", flag, " is '", text, "', but must be one of: ", known);
}

template <typename T>
const char* name_of(T value, const Choices<T>& choices) {
  return std::find_if(choices.begin(), choices.end(), [&](const auto& choice) { return choice.second == value; })->first;
}

// No flag needs a larger number, and products of two such numbers fit.
constexpr int64_t kLargest = 1'000'000'000;
constexpr int kMostThreads = 1024; // OpenMP would start them all

template <typename T>
void check_at_least(const char* flag, T value, T smallest) {
  TORCH_CHECK(value >= smallest, "--", flag, " is ", value, ", but must be at least ", smallest);
  TORCH_CHECK(value <= static_cast<T>(kLargest), "--", flag, " is ", value, ", but must be at most ", kLargest);
}

// Abseil's names have underscores; the usual spelling on a command line has dashes.
void use_underscores(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::string_view argument = argv[i];
    if (argument.substr(0, 2) != "--") continue;
    if (argument == "--") return;
    char* const end = argv[i] + std::min(argument.find('='), argument.size());
    std::replace(argv[i] + 2, end, '-', '_');
  }
}

void parse_command_line(int argc, char** argv) {
  use_underscores(argc, argv);
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = usage.contains_helpshort_flags = [](absl::string_view file) {
    return file.find("gpt/options.cpp") != absl::string_view::npos;
  };
  absl::SetFlagsUsageConfig(usage);
  if (absl::ProgramUsageMessage().find("never called") != absl::string_view::npos) { // it may be set only once
    absl::SetProgramUsageMessage("trains a byte-level GPT, sharded over ranks");
  }
  const auto rest = absl::ParseCommandLine(argc, argv);
  TORCH_CHECK(rest.size() == 1, "the argument '", rest[1], "' belongs to no flag (see --help)");
}

void check_model(const ModelConfig& model) {
  check_at_least<int64_t>("layers", model.layers, 1);
  check_at_least<int64_t>("width", model.width, 1);
  check_at_least<int64_t>("heads", model.heads, 1);
  check_at_least<int64_t>("sequence", model.sequence, 1);
  TORCH_CHECK(model.width % model.heads == 0, "--width ", model.width, " is no multiple of --heads ", model.heads);
}

void check_numbers(const Options& options) {
  check_at_least<int64_t>("steps", options.steps, 1);
  check_at_least<int64_t>("batch", absl::GetFlag(FLAGS_batch), 0);
  check_at_least<int64_t>("global-batch", options.global_batch, 0);
  TORCH_CHECK(options.batch + options.global_batch > 0, "--batch or --global-batch must be at least 1");
  TORCH_CHECK(std::isfinite(options.learning_rate) && options.learning_rate > 0, "--lr is ", options.learning_rate,
              ", but must be positive");
  check_at_least<int64_t>("warmup", options.warmup, 0);
  check_at_least("clip", options.clip, 0.0);
  check_at_least("weight-decay", options.weight_decay, 0.0);
  check_at_least("max-seconds", options.max_seconds, 0.0);
  check_at_least("ranks", options.ranks, 0);
  check_at_least("threads", options.threads, 0);
  TORCH_CHECK(options.threads <= kMostThreads, "--threads is ", options.threads, ", but must be at most ", kMostThreads);
  check_at_least<int64_t>("validate-every", options.validate_every, 0);
  check_at_least<int64_t>("validation-batches", options.validation_batches, 0);
  check_at_least<int64_t>("sample-bytes", options.sample_bytes, 0);
  check_at_least<int64_t>("save-every", options.save_every, 0);
  check_at_least("keep-last", options.keep_last, 0);
}

void check_combinations(const Options& options) {
  TORCH_CHECK(
      options.strategy != Strategy::kNone || options.precision == Precision::kFp32,
      "--precision bf16 needs sharding (the masters stay fp32): use --strategy no-shard, also on one rank, in place of none");
  TORCH_CHECK(options.strategy != Strategy::kNone || options.mesh.empty(), "--mesh has no meaning under --strategy none");
  TORCH_CHECK(options.strategy != Strategy::kHybrid || options.mesh.empty() || options.mesh.size() == 2,
              "--strategy hybrid needs a mesh of two dims (replicate x shard), but --mesh has ", options.mesh.size());
  TORCH_CHECK(options.strategy == Strategy::kHybrid || options.mesh.size() <= 1, "--strategy ", to_string(options.strategy),
              " needs a mesh of one dim, but --mesh has ", options.mesh.size());
  TORCH_CHECK(options.save_every == 0 || !options.checkpoint.empty(), "--save-every needs --checkpoint");
  TORCH_CHECK(!options.resume || !options.checkpoint.empty(), "--resume needs --checkpoint");
  TORCH_CHECK(options.sample_bytes == 0 || !options.prompt.empty(), "--prompt is empty");
  TORCH_CHECK(options.device == torch::kCPU || options.strategy != Strategy::kNone, "--strategy none runs on the CPU only");
}

} // namespace

Options parse_options(int argc, char** argv) {
  parse_command_line(argc, argv);
  Options options;
  options.data = absl::GetFlag(FLAGS_data);
  options.model = {absl::GetFlag(FLAGS_layers), absl::GetFlag(FLAGS_width), absl::GetFlag(FLAGS_heads),
                   absl::GetFlag(FLAGS_sequence)};
  options.steps = absl::GetFlag(FLAGS_steps);
  options.global_batch = absl::GetFlag(FLAGS_global_batch);
  options.batch = options.global_batch > 0 ? 0 : absl::GetFlag(FLAGS_batch);
  options.learning_rate = absl::GetFlag(FLAGS_lr);
  options.warmup = absl::GetFlag(FLAGS_warmup);
  options.clip = absl::GetFlag(FLAGS_clip);
  options.weight_decay = absl::GetFlag(FLAGS_weight_decay);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.max_seconds = absl::GetFlag(FLAGS_max_seconds);
  options.ranks = absl::GetFlag(FLAGS_ranks);
  if (!absl::GetFlag(FLAGS_mesh).empty()) options.mesh = parse_mesh(absl::GetFlag(FLAGS_mesh));
  options.device = choose("device", absl::GetFlag(FLAGS_device), kDevices);
  options.threads = absl::GetFlag(FLAGS_threads);
  options.strategy = choose("strategy", absl::GetFlag(FLAGS_strategy), kStrategies);
  options.layout = choose("layout", absl::GetFlag(FLAGS_layout), kLayouts);
  options.precision = choose("precision", absl::GetFlag(FLAGS_precision), kPrecisions);
  options.reduce_precision = choose("reduce-precision", absl::GetFlag(FLAGS_reduce_precision), kPrecisions);
  options.reshard_after_forward = choose("reshard-after-forward", absl::GetFlag(FLAGS_reshard_after_forward), kReshard);
  options.log = absl::GetFlag(FLAGS_log);
  options.samples = absl::GetFlag(FLAGS_samples);
  options.validate_every = absl::GetFlag(FLAGS_validate_every);
  options.validation_batches = absl::GetFlag(FLAGS_validation_batches);
  options.sample_bytes = absl::GetFlag(FLAGS_sample_bytes);
  options.prompt = absl::GetFlag(FLAGS_prompt);
  options.checkpoint = absl::GetFlag(FLAGS_checkpoint);
  options.save_every = absl::GetFlag(FLAGS_save_every);
  options.keep_last = absl::GetFlag(FLAGS_keep_last);
  options.resume = absl::GetFlag(FLAGS_resume);
  options.dump_initial = absl::GetFlag(FLAGS_dump_initial);
  check_model(options.model);
  check_numbers(options);
  check_combinations(options);
  return options;
}

void check_world(const Options& options, int world) {
  TORCH_CHECK(options.global_batch % world == 0, "--global-batch ", options.global_batch, " does not divide among ", world,
              " ranks");
  TORCH_CHECK(options.strategy != Strategy::kNone || world == 1, "--strategy none is for one process, but there are ", world,
              " ranks");
  if (options.strategy != Strategy::kNone) mesh_shape(options, world);
}

MeshShape mesh_shape(const Options& options, int world) {
  const bool hybrid = options.strategy == Strategy::kHybrid;
  auto shape = options.mesh;
  if (shape.empty()) {
    TORCH_CHECK(!hybrid || world % 2 == 0, "--strategy hybrid on ", world, " ranks needs --mesh: its default has 2 replicas");
    shape = hybrid ? std::vector<int64_t>{2, world / 2} : std::vector<int64_t>{world};
  }
  const auto size = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  TORCH_CHECK(size == world, "--mesh ", absl::StrJoin(shape, "x"), " holds ", size, " ranks, but there are ", world);
  if (hybrid) return {shape, {"replicate", "shard"}};
  return {shape, {options.strategy == Strategy::kNoShard ? "replicate" : "shard"}};
}

std::vector<int64_t> parse_mesh(const std::string& text) {
  std::vector<int64_t> shape;
  for (const auto part : absl::StrSplit(text, 'x')) {
    int32_t size = 0;
    TORCH_CHECK(absl::SimpleAtoi(part, &size) && size > 0, "--mesh is '", text,
                "', but must be sizes joined by x, such as 4 or 2x2");
    shape.push_back(size);
  }
  return shape;
}

const char* to_string(Strategy strategy) { return name_of(strategy, kStrategies); }
const char* to_string(Precision precision) { return name_of(precision, kPrecisions); }
const char* to_string(tessera::BufferLayout layout) { return name_of(layout, kLayouts); }

} // namespace gpt
