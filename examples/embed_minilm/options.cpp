#include "embed_minilm/options.h"

#include <absl/flags/flag.h>

#include <cmath>

#include "common/command_line.h"

ABSL_FLAG(std::string, model, ".data/minilm", "folder with config.json, vocab.txt and model.safetensors of a BERT model");
ABSL_FLAG(std::string, input, "examples/embed_minilm/sentences.txt", "file to embed, a sentence a line");
ABSL_FLAG(std::string, output, "", "folder for the embeddings: its model.safetensors holds \"embeddings\"; empty for none");
ABSL_FLAG(int64_t, batch, 32, "sentences that a rank embeds at a time");
ABSL_FLAG(std::string, pairs, "", "file to fine-tune on: two sentences a line that belong together, with a tab between them");
ABSL_FLAG(int64_t, global_batch, 12, "pairs a training step over all ranks");
ABSL_FLAG(int64_t, steps, 40, "training steps");
ABSL_FLAG(double, lr, 5e-5, "learning rate (AdamW)");
ABSL_FLAG(uint64_t, seed, 1, "of the order of the pairs");
ABSL_FLAG(std::string, save, "", "folder for the trained model, in the form of --model; empty for none");
ABSL_FLAG(std::string, log, "runs/embed_minilm.jsonl", "file for the training's losses, one JSON object a line; empty for none");

namespace minilm {

using examples::check_at_least;

namespace {

// "runs/minilm/" names the folder runs/minilm, not one in it.
std::string without_slash(std::string folder) {
  while (folder.size() > 1 && folder.ends_with('/')) folder.pop_back();
  return folder;
}

} // namespace

Options parse_options(int argc, char** argv) {
  examples::parse_command_line(argc, argv,
                               "embeds sentences with all-MiniLM-L6-v2, sharded over ranks, or fine-tunes it on pairs",
                               "embed_minilm/options.cpp");
  Options options{examples::job_options()};
  options.model = absl::GetFlag(FLAGS_model);
  options.input = absl::GetFlag(FLAGS_input);
  options.output = without_slash(absl::GetFlag(FLAGS_output));
  options.batch = absl::GetFlag(FLAGS_batch);
  options.pairs = absl::GetFlag(FLAGS_pairs);
  options.global_batch = absl::GetFlag(FLAGS_global_batch);
  options.steps = absl::GetFlag(FLAGS_steps);
  options.learning_rate = absl::GetFlag(FLAGS_lr);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.save = without_slash(absl::GetFlag(FLAGS_save));
  options.log = absl::GetFlag(FLAGS_log);
  check_at_least<int64_t>("batch", options.batch, 1);
  check_at_least<int64_t>("global-batch", options.global_batch, 1);
  check_at_least<int64_t>("steps", options.steps, 1);
  TORCH_CHECK(std::isfinite(options.learning_rate) && options.learning_rate > 0, "--lr is ", options.learning_rate,
              ", but must be positive");
  TORCH_CHECK(options.save.empty() || !options.pairs.empty(), "--save needs --pairs: without them nothing is trained");
  return options;
}

void check_world(const Options& options, int world) {
  TORCH_CHECK(options.pairs.empty() || options.global_batch % world == 0, "--global-batch ", options.global_batch,
              " does not divide among ", world, " ranks");
  examples::check_job(options, world);
}

} // namespace minilm
