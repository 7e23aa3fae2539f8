// Trains a small Llama on the bytes of a text, with its rows, sequences and layers split over ranks, and lets it write.
//
//   train_llama --ranks 8 --mesh 2x2x2 --dims dp,cp,tp --sequence-parallel --export runs/llama
//   train_llama --ranks 2 --mesh 2 --dims tp --import runs/llama --steps 0
#include <absl/flags/flag.h>
#include <fmt/format.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/split_sequence.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/command_line.h"
#include "common/files.h"
#include "common/job_options.h"
#include "common/program.h"
#include "common/ranks.h"
#include "llama/model.h"

ABSL_FLAG(std::string, data, ".data/text.txt", "text file to train on");
ABSL_FLAG(int64_t, steps, 100, "optimizer steps");
ABSL_FLAG(int64_t, rows, 8, "sequences a step, over all ranks of dp");
ABSL_FLAG(int64_t, sequence, 64, "bytes of a sequence");
ABSL_FLAG(int64_t, layers, 2, "blocks of the model");
ABSL_FLAG(int64_t, width, 64, "features of a token");
ABSL_FLAG(int64_t, heads, 8, "attention heads");
ABSL_FLAG(int64_t, key_heads, 2, "heads of keys and values");
ABSL_FLAG(double, lr, 3e-3, "learning rate (AdamW)");
ABSL_FLAG(bool, sequence_parallel, false, "split activations between the layers over the ranks of tp");
ABSL_FLAG(bool, ring, false, "attention sees split sequences by a ring; otherwise by all-gather");
ABSL_FLAG(std::string, prompt, "It was ", "what the model's text begins with");
ABSL_FLAG(int64_t, sample_bytes, 64, "length of the text that the model writes");
ABSL_FLAG(std::string, import, "", "Hugging Face folder with the first weights; empty: random ones");
ABSL_FLAG(std::string, export, "", "Hugging Face folder for the last weights; empty: none");

namespace {

using torch::Tensor;

/// dp x cp x tp.
tessera::DeviceMesh make_mesh(const examples::JobOptions& options) {
  const int64_t world = examples::world_size(), cp = options.context_parallel.value_or(1),
                tp = options.tensor_parallel.value_or(1);
  TORCH_CHECK(world % (cp * tp) == 0, "cp x tp, ", cp, " x ", tp, " ranks, do not divide ", world);
  return tessera::init_device_mesh(options.device, {world / cp / tp, cp, tp}, {"dp", "cp", "tp"});
}

void split(llama::Llama& model, const tessera::DeviceMesh& mesh) {
  const auto plan = llama::parallel_plan(model->config(), mesh.size(2), absl::GetFlag(FLAGS_sequence_parallel));
  tessera::parallelize(*model, mesh["tp"], plan);
  const auto parameters = mesh[{"dp", "cp"}].flatten("dp_cp");
  for (const auto& block : *model->blocks()) tessera::fully_shard(*block, parameters).set_gradient_divide_factor(1);
  tessera::fully_shard(*model, parameters).set_gradient_divide_factor(1);
}

/// Sequences of a text, the same rows on whatever ranks.
struct Text {
  std::string bytes;

  /// This rank's rows of a step: [rows / ranks, length].
  Tensor rows(int64_t step, int64_t rank, int64_t ranks) const {
    const auto all = absl::GetFlag(FLAGS_rows), length = absl::GetFlag(FLAGS_sequence);
    TORCH_CHECK(all % ranks == 0, "--rows ", all, " do not divide among ", ranks, " ranks of dp");
    TORCH_CHECK(static_cast<int64_t>(bytes.size()) > length, "the text has ", bytes.size(), " bytes, and --sequence is ", length);
    constexpr int64_t kStride = 7919; // a prime, so that rows seldom begin alike
    auto tokens = torch::empty({all / ranks, length}, torch::kLong);
    for (int64_t row = 0; row < tokens.size(0); ++row) {
      const auto number = step * all + rank * tokens.size(0) + row;
      const auto begin = number * kStride % (static_cast<int64_t>(bytes.size()) - length);
      for (int64_t i = 0; i < length; ++i) tokens[row][i] = static_cast<uint8_t>(bytes[static_cast<size_t>(begin + i)]);
    }
    return tokens;
  }
};

/// This rank's loss, of which the sum over dp and cp is the mean over the labels of all rows.
Tensor loss_of(llama::Llama& model, const Tensor& tokens, const tessera::DeviceMesh& mesh) {
  using tessera::ContextParallel;
  const auto parts = tessera::split_sequence({tokens}, {1}, mesh["cp"], {.labels_of = 0});
  const tessera::ContextParallelScope scope(absl::GetFlag(FLAGS_ring) ? ContextParallel::kRing : ContextParallel::kAllGather,
                                            parts.mesh);
  const auto logits = model->forward(parts.tensors[0].local(), tessera::to_local(parts.positions));
  const auto labels = absl::GetFlag(FLAGS_rows) * (tokens.size(1) - 1);
  return torch::cross_entropy_loss(logits.flatten(0, 1), tessera::to_local(parts.labels).flatten(), {}, at::Reduction::Sum) /
         static_cast<double>(labels);
}

void print(const std::string& line) {
  if (examples::rank() == 0) std::printf("%s\n", line.c_str());
}

void train(llama::Llama& model, const tessera::DeviceMesh& mesh) {
  const Text text{examples::read_file(absl::GetFlag(FLAGS_data), "the data file", "scripts/setup makes it")};
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(absl::GetFlag(FLAGS_lr)));
  for (int64_t step = 0; step < absl::GetFlag(FLAGS_steps); ++step) {
    const auto tokens = text.rows(step, mesh.local_rank("dp"), mesh.size(0)).to(mesh.device());
    if (step == 0) tessera::check_same_batch({tokens}, mesh["tp"]);
    optimizer.zero_grad();
    const auto loss = loss_of(model, tokens, mesh);
    loss.backward();
    tessera::clip_grad_norm_(*model, 1.0);
    optimizer.step();
    const auto sum = examples::sum_over_ranks({loss.item<double>()})[0] / static_cast<double>(mesh.size(2));
    print(fmt::format("step {} loss {:.9f}", step + 1, sum));
  }
}

/// The likeliest bytes after a prompt. Every rank has the same.
std::string write_on(llama::Llama& model, std::string text, torch::Device device) {
  const torch::NoGradGuard no_grad;
  for (int64_t i = 0; i < absl::GetFlag(FLAGS_sample_bytes); ++i) {
    const auto bytes = torch::from_blob(text.data(), {1, static_cast<int64_t>(text.size())}, torch::kUInt8).to(torch::kLong);
    const auto logits = tessera::DTensor(model->forward(bytes.to(device))).full_tensor();
    text.push_back(static_cast<char>(logits[0][-1].argmax().item<int64_t>()));
  }
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c != '\n' && (c < ' ' || c > '~'); }, '?');
  return text;
}

/// What Hugging Face's library reads beside the weights.
void write_config(const llama::Config& config, const std::filesystem::path& folder) {
  const nlohmann::json json{{"architectures", {"LlamaForCausalLM"}},
                            {"model_type", "llama"},
                            {"hidden_act", "silu"},
                            {"tie_word_embeddings", false},
                            {"attention_bias", false},
                            {"vocab_size", config.vocab_size},
                            {"hidden_size", config.hidden_size},
                            {"intermediate_size", config.intermediate_size},
                            {"num_hidden_layers", config.num_hidden_layers},
                            {"num_attention_heads", config.num_attention_heads},
                            {"num_key_value_heads", config.num_key_value_heads},
                            {"rope_theta", config.rope_theta},
                            {"rms_norm_eps", config.rms_norm_eps}};
  examples::open_for_writing((folder / "config.json").string()) << json.dump(2) << '\n';
}

llama::Config config_of_flags() {
  llama::Config config;
  config.num_hidden_layers = absl::GetFlag(FLAGS_layers);
  config.hidden_size = absl::GetFlag(FLAGS_width);
  config.intermediate_size = config.hidden_size * 11 / 4; // as Llama's, about 8/3
  config.num_attention_heads = absl::GetFlag(FLAGS_heads);
  config.num_key_value_heads = absl::GetFlag(FLAGS_key_heads);
  return config;
}

void run(const examples::JobOptions& options) {
  examples::join_job(options.threads);
  const auto mesh = make_mesh(options);
  torch::manual_seed(1);
  llama::Llama model(config_of_flags());
  split(model, mesh);
  if (const auto folder = absl::GetFlag(FLAGS_import); !folder.empty())
    tessera::checkpoint::load(tessera::state_dict(*model), folder);
  train(model, mesh);
  print("text: " + write_on(model, absl::GetFlag(FLAGS_prompt), mesh.device()));
  if (const auto folder = absl::GetFlag(FLAGS_export); !folder.empty()) {
    tessera::checkpoint::save_hugging_face(tessera::state_dict(*model), folder, {.overwrite = true});
    if (examples::rank() == 0) write_config(model->config(), folder);
  }
  tessera::destroy_process_group();
}

int start(int argc, char** argv) {
  examples::parse_command_line(argc, argv, "trains a small Llama, split over ranks", "llama/train_llama.cpp");
  const auto options = examples::job_options(/*splits_models=*/true);
  return examples::run_ranks(options.ranks, [&] { run(options); });
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("train_llama", [&] { return start(argc, argv); });
}
