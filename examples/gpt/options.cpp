#include "gpt/options.h"

#include <absl/flags/flag.h>

#include <cmath>

#include "common/command_line.h"

ABSL_FLAG(std::string, data, ".data/text.txt", "text file to train on; its last twentieth is for validation");
ABSL_FLAG(int64_t, layers, 4, "blocks of the model");
ABSL_FLAG(int64_t, width, 128, "features of a token; a multiple of --heads");
ABSL_FLAG(int64_t, heads, 4, "attention heads");
ABSL_FLAG(int64_t, sequence, 64, "bytes of context");
ABSL_FLAG(int64_t, experts, 0,
          "of each block, in the place of its MLP; a dim ep of --dims splits them, and so does tp; 0 for none");
ABSL_FLAG(int64_t, top_k, 2, "experts of a token");
ABSL_FLAG(double, balance_loss, 0.01, "coefficient of the loss that balances experts");
ABSL_FLAG(int64_t, steps, 600, "optimizer steps");
ABSL_FLAG(int64_t, batch, 4, "sequences a rank and step");
ABSL_FLAG(int64_t, global_batch, 0,
          "sequences a step over all ranks, in place of --batch: the loss curve then does not depend on the ranks");
ABSL_FLAG(int32_t, context_ranks, 1, "ranks over which each sequence is split, as the dim cp of --dims; they have the same rows");
ABSL_FLAG(std::string, context, "all-gather", "how attention sees split sequences: all-gather, ring or ulysses");
ABSL_FLAG(
    std::string, optimizer, "adamw",
    "adamw, fused-adamw, adamw-bf16, adamw-8bit, sgd, lion, lamb, adafactor, muon, and with --strategy=no-shard onebit-adam, "
    "onebit-lamb or zero-one-adam");
ABSL_FLAG(bool, step_in_backward, false,
          "step each group's parameters as soon as its gradients are reduced, and keep none; with --clip=0");
ABSL_FLAG(double, lr, 5e-3, "highest learning rate; it fits adamw, fused-adamw and muon");
ABSL_FLAG(int64_t, warmup, 40, "steps of linear warm-up; then the learning rate follows a cosine down to a tenth");
ABSL_FLAG(double, clip, 1.0, "largest global gradient norm; 0 for none");
ABSL_FLAG(double, weight_decay, 0.1, "of matrices; norms and biases have none");
ABSL_FLAG(bool, recompute, false,
          "keep only the inputs of the blocks, and compute the rest again in backward: less memory, more time");
ABSL_FLAG(bool, sequence_parallel, false, "split activations between the layers over their time; needs a dim tp");
ABSL_FLAG(std::string, overlap, "never",
          "of layers and their collectives under --sequence-parallel: never, always, or measured, as is faster");
ABSL_FLAG(std::string, schedule, "1f1b",
          "of a pipeline: gpipe, 1f1b, zb-h1, interleaved-1f1b, looped-bfs, interleaved-zb, zb-v or dualpipe-v; needs a dim pp");
ABSL_FLAG(int64_t, micro_batches, 4, "into which a pipeline cuts the rows of a step");
ABSL_FLAG(uint64_t, seed, 1, "of the initial weights, the batches and the samples");
ABSL_FLAG(double, max_seconds, 0, "stop training after so many seconds; 0 for never");
ABSL_FLAG(std::string, log, "runs/train_gpt.jsonl", "file for the metrics, one JSON object a line; empty for none");
ABSL_FLAG(std::string, samples, "runs/samples.txt", "file for the text sampled at the end; empty for none");
ABSL_FLAG(int64_t, validate_every, 100, "steps between validations; 0: only at the end");
ABSL_FLAG(int64_t, validation_batches, 8, "batches of a validation; 0 for no validation");
ABSL_FLAG(int64_t, sample_bytes, 256, "length of the sampled text");
ABSL_FLAG(std::string, prompt, "It is a truth ", "what the sampled text begins with");
ABSL_FLAG(std::string, checkpoint, "",
          "folder for checkpoints, one folder step-<n> in it each, none yet unless --resume; empty for none. At SIGTERM the "
          "training is saved there, and ends with status 0");
ABSL_FLAG(int64_t, save_every, 0, "steps between checkpoints; 0: only after the last step");
ABSL_FLAG(int32_t, keep_last, 0, "checkpoints to keep, at least 2, older ones are removed; 0 for all");
ABSL_FLAG(bool, resume, false, "go on from the newest checkpoint in --checkpoint, if there is one");
ABSL_FLAG(std::string, trace, "",
          "folder for a trace of the third step from each rank, for chrome://tracing and ui.perfetto.dev; empty for none");
ABSL_FLAG(std::string, dump_initial, "",
          "folder for the initial weights and the batches of all steps, for another program to train on");

namespace gpt {
namespace {

using examples::check_at_least;

void check_model(const ModelConfig& model) {
  check_at_least<int64_t>("layers", model.layers, 1);
  check_at_least<int64_t>("width", model.width, 1);
  check_at_least<int64_t>("heads", model.heads, 1);
  check_at_least<int64_t>("sequence", model.sequence, 1);
  TORCH_CHECK(model.width % model.heads == 0, "--width ", model.width, " is no multiple of --heads ", model.heads);
  check_at_least<int64_t>("experts", model.experts, 0);
  check_at_least<int64_t>("top-k", model.top_k, 1);
  check_at_least("balance-loss", model.balance, 0.0);
  TORCH_CHECK(model.experts == 0 || model.top_k <= model.experts, "--top-k ", model.top_k, " of --experts ", model.experts);
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
  check_at_least<int64_t>("validate-every", options.validate_every, 0);
  check_at_least<int64_t>("validation-batches", options.validation_batches, 0);
  check_at_least<int64_t>("sample-bytes", options.sample_bytes, 0);
  check_at_least<int64_t>("save-every", options.save_every, 0);
  check_at_least("keep-last", options.keep_last, 0);
  TORCH_CHECK(options.keep_last != 1, "--keep-last is 1, but must be at least 2, as the newest may be unfinished, or 0 for all");
}

void check_combinations(const Options& options) {
  TORCH_CHECK(options.save_every == 0 || !options.checkpoint.empty(), "--save-every needs --checkpoint");
  const auto tensor_parallel = options.tensor_parallel.value_or(1);
  TORCH_CHECK(options.model.heads % tensor_parallel == 0, "--heads ", options.model.heads, " does not divide among the ",
              tensor_parallel, " ranks of tp");
  TORCH_CHECK(!options.sequence_parallel || options.tensor_parallel,
              "--sequence-parallel needs a dim tp: --mesh 2x2 --dims dp,tp");
  TORCH_CHECK(options.sequence_parallel || options.overlap == tessera::Overlap::kNever, "--overlap ", to_string(options.overlap),
              " needs --sequence-parallel");
  TORCH_CHECK(!options.resume || !options.checkpoint.empty(), "--resume needs --checkpoint");
  TORCH_CHECK(!options.step_in_backward || options.clip == 0,
              "--step-in-backward steps before all gradients are there, whose norm --clip limits: it needs --clip=0");
  TORCH_CHECK(!options.step_in_backward || !options.pipeline,
              "--step-in-backward and a dim pp: a stage has its gradients at once");
  TORCH_CHECK(!reduces_by_itself(options.optimizer) || !options.strategy || options.strategy == Strategy::kNoShard,
              "--optimizer ", options.optimizer,
              " reduces between ranks that have the whole model: it needs --strategy=no-shard");
  TORCH_CHECK(options.sample_bytes == 0 || !options.prompt.empty(), "--prompt is empty");
}

tessera::ContextParallel parse_context(const std::string& name) {
  using tessera::ContextParallel;
  for (const auto scheme : {ContextParallel::kAllGather, ContextParallel::kRing, ContextParallel::kUlysses}) {
    if (name == tessera::to_string(scheme)) return scheme;
  }
  TORCH_CHECK(false, "--context is '", name, "', but must be all-gather, ring or ulysses");
}

/// Those of the dim cp, or of the flag.
int context_ranks(const Options& options) {
  const auto ranks = absl::GetFlag(FLAGS_context_ranks);
  if (!options.context_parallel) return ranks;
  TORCH_CHECK(ranks == 1 || ranks == *options.context_parallel, "--context-ranks ", ranks, ", but the dim cp has ",
              *options.context_parallel, "; one of them is enough");
  return static_cast<int>(*options.context_parallel);
}

void check_pipeline(const Options& options) {
  check_at_least<int64_t>("micro-batches", options.micro_batches, 1);
  if (!options.pipeline) return;
  TORCH_CHECK(options.strategy, "--dims pp needs a --strategy other than none");
  TORCH_CHECK(options.context_ranks == 1, "--context-ranks ", options.context_ranks,
              " and a dim pp: this program splits either sequences or layers");
  TORCH_CHECK(options.dump_initial.empty(), "--dump-initial writes the whole model, which no rank has with a dim pp");
}

void check_experts(const Options& options) {
  const auto experts = options.model.experts;
  TORCH_CHECK(!options.expert_parallel || experts > 0, "--dims with ep needs --experts");
  if (experts == 0) return;
  TORCH_CHECK(experts % options.expert_ranks() == 0, "--experts ", experts, " do not divide among the ", options.expert_ranks(),
              " ranks of ep and tp");
  TORCH_CHECK(options.precision != examples::Precision::kFp16 || options.model.balance == 0,
              "--balance-loss with --precision fp16: this program scales no loss that is inside of the model; take 0, or bf16");
}

void check_context(const Options& options) {
  check_at_least("context-ranks", options.context_ranks, 1);
  if (options.context_ranks == 1) return;
  TORCH_CHECK(options.strategy, "--context-ranks ", options.context_ranks, " needs a --strategy other than none");
  const int64_t chunks = 2 * options.context_ranks;
  TORCH_CHECK(options.model.sequence % chunks == 0, "--sequence ", options.model.sequence, " does not divide into ", chunks,
              " chunks, two for each of --context-ranks ", options.context_ranks);
  const auto heads = options.model.heads / options.tensor_parallel.value_or(1);
  TORCH_CHECK(options.context != tessera::ContextParallel::kUlysses || heads % options.context_ranks == 0, "--heads ",
              options.model.heads, " do not divide among --context-ranks ", options.context_ranks,
              options.tensor_parallel ? " in the ranks of tp" : "", ", which --context ulysses needs");
}

ModelConfig model_config() {
  return {.layers = absl::GetFlag(FLAGS_layers),
          .width = absl::GetFlag(FLAGS_width),
          .heads = absl::GetFlag(FLAGS_heads),
          .sequence = absl::GetFlag(FLAGS_sequence),
          .experts = absl::GetFlag(FLAGS_experts),
          .top_k = absl::GetFlag(FLAGS_top_k),
          .balance = absl::GetFlag(FLAGS_balance_loss)};
}

/// Reads how sequences, activations and layers are split over ranks.
void read_splits(Options& options) {
  options.context_ranks = context_ranks(options);
  options.context = parse_context(absl::GetFlag(FLAGS_context));
  options.sequence_parallel = absl::GetFlag(FLAGS_sequence_parallel);
  options.overlap = tessera::overlap_of(absl::GetFlag(FLAGS_overlap));
  options.schedule = tessera::pipeline_schedule_kind(absl::GetFlag(FLAGS_schedule));
  options.micro_batches = absl::GetFlag(FLAGS_micro_batches);
}

} // namespace

bool reduces_by_itself(const std::string& optimizer) {
  return optimizer == "onebit-adam" || optimizer == "onebit-lamb" || optimizer == "zero-one-adam";
}

Options parse_options(int argc, char** argv) {
  examples::parse_command_line(argc, argv, "trains a byte-level GPT, sharded over ranks", "gpt/options.cpp");
  Options options{examples::job_options(/*splits_models=*/true)};
  options.data = absl::GetFlag(FLAGS_data);
  options.model = model_config();
  options.steps = absl::GetFlag(FLAGS_steps);
  options.global_batch = absl::GetFlag(FLAGS_global_batch);
  options.batch = options.global_batch > 0 ? 0 : absl::GetFlag(FLAGS_batch);
  options.optimizer = absl::GetFlag(FLAGS_optimizer);
  options.step_in_backward = absl::GetFlag(FLAGS_step_in_backward);
  options.learning_rate = absl::GetFlag(FLAGS_lr);
  options.warmup = absl::GetFlag(FLAGS_warmup);
  options.clip = absl::GetFlag(FLAGS_clip);
  options.weight_decay = absl::GetFlag(FLAGS_weight_decay);
  options.recompute = absl::GetFlag(FLAGS_recompute);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.max_seconds = absl::GetFlag(FLAGS_max_seconds);
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
  options.trace = absl::GetFlag(FLAGS_trace);
  options.dump_initial = absl::GetFlag(FLAGS_dump_initial);
  read_splits(options);
  check_model(options.model);
  check_numbers(options);
  check_combinations(options);
  check_context(options);
  check_pipeline(options);
  check_experts(options);
  return options;
}

void check_world(const Options& options, int world) {
  TORCH_CHECK(world % options.context_ranks == 0, "--context-ranks ", options.context_ranks, " does not divide ", world,
              " ranks");
  examples::check_job(options, world);
  const auto ranks = options.data_ranks(world);
  TORCH_CHECK(options.global_batch % ranks == 0, "--global-batch ", options.global_batch, " does not divide among ", ranks,
              options.context_ranks > 1 ? " groups of ranks" : " ranks");
  const auto rows = options.rows_a_rank(world);
  TORCH_CHECK(!options.pipeline || rows >= options.micro_batches, "--micro-batches ", options.micro_batches, " of ", rows,
              " rows a rank: each needs one");
}

} // namespace gpt
