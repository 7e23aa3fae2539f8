// Fine-tunes a sentence encoder on pairs of sentences, from a Hugging Face folder to a Hugging Face folder, sharded over ranks:
// all of its weights, or adapters (LoRA). A run goes on from the newest checkpoint in the config's folder where there is one.
//
//   scripts/setup --minilm
//   build/release/bin/finetune --ranks 2
//   build/release/bin/finetune --ranks 2 --config examples/finetune/lora.json --output runs/adapters --merged runs/merged
#include <absl/flags/flag.h>
#include <tessera/tessera.h>

#include <csignal>
#include <filesystem>
#include <iostream>

#include "common/command_line.h"
#include "common/program.h"
#include "common/ranks.h"
#include "finetune/lora.h"
#include "finetune/pair_rows.h"

ABSL_FLAG(int32_t, ranks, 0, "local ranks to start; 0: the environment (torchrun, Slurm, mpirun) says what rank this process is");
ABSL_FLAG(std::string, config, "examples/finetune/finetune.json", "the training: DeepSpeed's JSON, with the block \"tessera\"");
ABSL_FLAG(std::string, model, ".data/minilm", "Hugging Face folder of the BERT that the training begins with");
ABSL_FLAG(std::string, output, "runs/finetuned", "new folder for the result: a model, or with adapters these alone");
ABSL_FLAG(std::string, merged, "", "new folder for a model with the adapters merged into its weights; empty for none");

namespace {

struct DataOptions {
  std::string pairs = "examples/embed_minilm/pairs.tsv";
  int64_t held_out = 12; // the last pairs, for the evaluations
  void read(tessera::OwnSettings& settings) { settings.read("pairs", pairs).read("held_out", held_out); }
};

minilm::Bert make_model(const minilm::ModelFolder& folder, const tessera::TrainConfig& config, const lora::Options& adapters,
                        const tessera::DeviceMesh& mesh) {
  auto bert = tessera::on_meta([&] { return minilm::Bert(folder.config()); });
  if (adapters.rank > 0) lora::add_adapters(*bert, adapters);
  config.set_dtype(*bert);
  bert->recompute_layers(config.sharding.recompute);
  for (const auto& layer : *bert->layers()) tessera::fully_shard(*layer, config.shard_mesh(mesh), config.shard_options());
  tessera::fully_shard(*bert, config.shard_mesh(mesh), config.shard_options());
  tessera::materialize(*bert, [](torch::nn::Module&) {}); // the values come from the file, but those of adapters
  folder.load(*bert, [](const std::string& name) { return !lora::is_adapter(name); });
  torch::manual_seed(config.trainer.seed); // the same adapters on any number of ranks
  for (auto* layer : lora::adapted_layers(*bert)) layer->reset_adapter();
  return bert;
}

void write_model(const minilm::Bert& bert, const minilm::ModelFolder& from, const std::string& to) {
  auto weights = tessera::state_dict(*bert);
  weights.erase_if([](const auto& entry) { return lora::is_adapter(entry.name); });
  weights.merge(from.rest());
  tessera::checkpoint::save_hugging_face(weights, to);
  if (examples::rank() == 0) from.copy_all_but_weights(to);
}

void write_result(minilm::Bert& bert, const minilm::ModelFolder& from, const tessera::TrainConfig& config,
                  const lora::Options& adapters) {
  if (const auto& save = config.trainer.save; !save.best.empty()) {
    const auto best = std::filesystem::path(save.folder) / "best";
    tessera::checkpoint::load(tessera::state_dict(*bert, {.ignore_frozen_params = true}), best, {.allow_unused = true});
  }
  const auto output = absl::GetFlag(FLAGS_output), merged = absl::GetFlag(FLAGS_merged);
  adapters.rank > 0 ? lora::save_adapters(*bert, adapters, from.path(), output) : write_model(bert, from, output);
  if (merged.empty()) return;
  for (auto* layer : lora::adapted_layers(*bert)) layer->merge_adapter();
  write_model(bert, from, merged);
}

void check_outputs() { // an error now, not after the training
  for (const auto& folder : {absl::GetFlag(FLAGS_output), absl::GetFlag(FLAGS_merged)})
    TORCH_CHECK(!std::filesystem::exists(folder), folder,
                " exists already; move it away, or choose another --output or --merged");
}

void train() {
  examples::join_job(/*threads=*/0);
  const auto config = tessera::TrainConfig::read(absl::GetFlag(FLAGS_config), {.ranks = examples::world_size()});
  const auto data = config.own<DataOptions>("data");
  const auto adapters = config.own<lora::Options>("model");
  TORCH_CHECK(absl::GetFlag(FLAGS_merged).empty() || adapters.rank > 0, "--merged is for adapters, but lora_r is 0");
  const auto mesh = config.make_mesh(torch::kCPU), ranks = config.data_mesh(mesh).flatten("rows");
  TORCH_CHECK(ranks.size() == mesh.size(), absl::GetFlag(FLAGS_config), ": finetune splits no layers or sequences (pp, cp, tp)");
  const minilm::ModelFolder folder(absl::GetFlag(FLAGS_model));
  auto bert = make_model(folder, config, adapters, mesh);
  const auto optimizer = config.make_optimizer(*bert);
  const auto schedule = config.make_schedule(*optimizer);
  const finetune::PairRows pairs(data.pairs, folder.tokenizer(bert->config()), bert->config().max_position_embeddings);
  const auto rows_of = [&](const finetune::PairRows& rows, bool shuffle) {
    return tessera::RowSource(rows, ranks, {.batch = config.batch.micro, .shuffle = shuffle, .seed = config.trainer.seed});
  };

  tessera::Trainer<finetune::PairBatch> trainer(*bert, *optimizer, config.trainer_options(mesh));
  trainer.loss([&](const auto& batch) { return finetune::contrastive_loss(embed(bert, batch.sentences, mesh.device()), ranks); })
      .state([&](auto) { return tessera::state_dict(*bert, *optimizer, {.ignore_frozen_params = true}); })
      .data(tessera::prefetch(rows_of(pairs.without_last(data.held_out), /*shuffle=*/true)));
  if (data.held_out > 0) trainer.evaluate("held out", rows_of(pairs.last(data.held_out), /*shuffle=*/false));
  if (schedule) trainer.schedule(*schedule);
  const bool terminated = trainer.run().reason == tessera::StopReason::kTerminated;
  if (!terminated) write_result(bert, folder, config, adapters);
  tessera::destroy_process_group();
  if (terminated) std::raise(SIGTERM); // it has saved, and ends as the signal says; the next run goes on
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("finetune", [&] {
    examples::parse_command_line(argc, argv, "fine-tunes a sentence encoder, sharded over ranks", "finetune/finetune.cpp");
    check_outputs();
    return examples::run_ranks(absl::GetFlag(FLAGS_ranks), train);
  });
}
