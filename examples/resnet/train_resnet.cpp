// Trains a residual network on images of handwritten digits, sharded over ranks, with what an everyday training needs. A run goes
// on from the newest checkpoint in runs/resnet where there is one, on any number of ranks.
//
//   scripts/setup --digits
//   build/release/bin/train_resnet --ranks 4 --replicas 2
#include <absl/flags/flag.h>
#include <fmt/format.h>
#include <tessera/tessera.h>

#include <iostream>

#include "common/command_line.h"
#include "common/program.h"
#include "common/ranks.h"
#include "resnet/digits.h"
#include "resnet/model.h"

ABSL_FLAG(int32_t, ranks, 0, "local ranks to start; 0: the environment (torchrun, Slurm, mpirun) says what rank this process is");
ABSL_FLAG(std::string, strategy, "fully-shard", "fully-shard, replicate, or none (one process, nothing is sharded)");
ABSL_FLAG(int64_t, replicas, 1, "fully-shard: how many groups of ranks hold the model, each one sharded over its group (HSDP)");
ABSL_FLAG(bool, reshard_after_forward, true, "fully-shard: free a block's parameters between forward and backward");
ABSL_FLAG(bool, per_parameter, false, "fully-shard: split each parameter over the ranks, in place of stretches of a group");
ABSL_FLAG(std::string, dtype, "float", "float, double, or bfloat16 (for forward and backward; the shards are float)");
ABSL_FLAG(std::string, data, ".data/digits.csv", "the images");
ABSL_FLAG(int64_t, width, 16, "channels of the first block");
ABSL_FLAG(double, dropout, 0.1, "before the last layer");
ABSL_FLAG(int64_t, epochs, 10, "of the whole training");
ABSL_FLAG(int64_t, batch, 32, "rows of a micro-batch, on all ranks together");
ABSL_FLAG(int64_t, micro_batches, 4, "of a step");
ABSL_FLAG(double, lr, 0.1, "highest learning rate");
ABSL_FLAG(uint64_t, seed, 1, "of the initial weights, the order of the data, and the dropout");
ABSL_FLAG(std::string, checkpoint, "runs/resnet", "folder for checkpoints");
ABSL_FLAG(int64_t, save_every, 25, "steps between checkpoints; the last step is saved too");
ABSL_FLAG(int64_t, stop_after, examples::kLargest, "end this run after so many steps of the training, as a time limit would");
ABSL_FLAG(std::string, export_to, "runs/resnet-averaged",
          "folder for the averaged weights at the end, in Hugging Face's format; with .pt a file");
ABSL_FLAG(std::string, log, "", "file for losses and evaluations, one JSON object a line");

namespace {

namespace F = torch::nn::functional;
using Batch = torch::data::Example<>;

enum class Strategy { kFullyShard, kReplicate, kNone };
const examples::Choices<Strategy> kStrategies{
    {"fully-shard", Strategy::kFullyShard}, {"replicate", Strategy::kReplicate}, {"none", Strategy::kNone}};
const examples::Choices<torch::Dtype> kDtypes{
    {"float", torch::kFloat}, {"double", torch::kDouble}, {"bfloat16", torch::kBFloat16}};

Strategy strategy() { return examples::choose("strategy", absl::GetFlag(FLAGS_strategy), kStrategies); }
torch::Dtype dtype() { return examples::choose("dtype", absl::GetFlag(FLAGS_dtype), kDtypes); }
torch::Dtype data_dtype() { return dtype() == torch::kDouble ? torch::kDouble : torch::kFloat; }

tessera::DeviceMesh make_mesh() {
  const int64_t ranks = examples::world_size(), replicas = absl::GetFlag(FLAGS_replicas), batch = absl::GetFlag(FLAGS_batch);
  TORCH_CHECK(strategy() != Strategy::kNone || ranks == 1, "--strategy none is for one process, but there are ", ranks, " ranks");
  TORCH_CHECK(replicas > 0 && ranks % replicas == 0, "--replicas ", replicas, " does not divide the ", ranks, " ranks");
  TORCH_CHECK(batch > 0 && batch % ranks == 0, "--batch ", batch, " does not divide among ", ranks, " ranks");
  return tessera::init_device_mesh(torch::kCPU, {replicas, ranks / replicas}, {"replicate", "shard"});
}

int64_t rows_a_rank() { return absl::GetFlag(FLAGS_batch) / examples::world_size(); } // of a micro-batch

void shard(resnet::ResNet& model, const tessera::DeviceMesh& mesh) {
  tessera::convert_sync_batch_norm(*model, mesh); // the statistics are those of all ranks' rows
  tessera::FullyShardOptions options;
  if (!absl::GetFlag(FLAGS_reshard_after_forward)) options.reshard_after_forward = false;
  if (absl::GetFlag(FLAGS_per_parameter)) options.layout = tessera::BufferLayout::kPerParameter;
  if (dtype() == torch::kBFloat16) {
    options.mixed_precision.param_dtype = torch::kBFloat16;
    options.mixed_precision.reduce_dtype = torch::kFloat;
    options.mixed_precision.keep_in_fp32 = {"BatchNorm2d", "head"}; // a type, and the name of the last layer
  }
  const auto shard_one = [&](torch::nn::Module& module) {
    if (strategy() == Strategy::kReplicate) tessera::replicate(module, mesh.flatten(), options);
    if (strategy() == Strategy::kFullyShard) tessera::fully_shard(module, mesh, options);
  };
  for (auto& block : *model->blocks) shard_one(*block.ptr()); // a group of parameters for each block
  shard_one(*model);                                          // and one for the rest
}

resnet::ResNet make_model(const tessera::DeviceMesh& mesh) {
  torch::manual_seed(absl::GetFlag(FLAGS_seed)); // the same initial weights on every rank
  resnet::ResNet model(absl::GetFlag(FLAGS_width), absl::GetFlag(FLAGS_dropout));
  if (dtype() == torch::kDouble) model->to(torch::kDouble); // which casts BatchNorm's counts too
  if (strategy() != Strategy::kNone) shard(model, mesh);
  return model;
}

// Each row counts once an epoch: the last batches of some ranks may be smaller by a row.
auto rows_of(resnet::Digits data, const tessera::DeviceMesh& mesh, bool shuffle) {
  tessera::DatasetRows rows(std::move(data).map(torch::data::transforms::Stack<>()));
  return tessera::RowSource(
      std::move(rows), mesh,
      {.batch = rows_a_rank(), .shuffle = shuffle, .seed = absl::GetFlag(FLAGS_seed), .last_rows = tessera::LastRows::kUneven});
}

resnet::Digits digits(resnet::Digits::Part part) { return {absl::GetFlag(FLAGS_data), part, data_dtype()}; }

int64_t count_steps(int64_t batches) { // of all epochs; the last step of an epoch may have fewer micro-batches
  const auto micro_batches = absl::GetFlag(FLAGS_micro_batches);
  return absl::GetFlag(FLAGS_epochs) * ((batches + micro_batches - 1) / micro_batches);
}

tessera::TrainerOptions trainer_options(const tessera::DeviceMesh& mesh, int64_t steps) {
  return {.mesh = mesh,
          .micro_batches = absl::GetFlag(FLAGS_micro_batches),
          .max_grad_norm = 1,
          .seed = absl::GetFlag(FLAGS_seed),
          .stop_after = {.steps = std::min(absl::GetFlag(FLAGS_stop_after), steps)},
          .save = {.folder = absl::GetFlag(FLAGS_checkpoint), .every = {.steps = absl::GetFlag(FLAGS_save_every)}, .keep = 2},
          .log = {.jsonl = absl::GetFlag(FLAGS_log)}};
}

tessera::Loss loss_of(resnet::ResNet& model, const Batch& batch, torch::Device device) {
  const auto scores = model->forward(batch.data.to(device)), target = batch.target.to(device);
  const auto rows = static_cast<double>(target.size(0));
  return tessera::LossMean{F::cross_entropy(scores, target), rows, {{"accuracy", {(scores.argmax(1) == target).sum(), rows}}}};
}

void export_weights(const resnet::ResNet& model) {
  const auto weights = tessera::state_dict(*model);
  const auto to = absl::GetFlag(FLAGS_export_to);
  tessera::checkpoint::save_hugging_face(weights, to, {.overwrite = true});
  tessera::checkpoint::save_torch(weights, to + ".pt", {.overwrite = true}); // for torch.load in Python, and torch::load
}

void train() {
  examples::check_at_least<int64_t>("micro-batches", absl::GetFlag(FLAGS_micro_batches), 1);
  examples::check_at_least<int64_t>("save-every", absl::GetFlag(FLAGS_save_every), 1);
  examples::join_job(/*threads=*/0);
  const auto mesh = make_mesh();
  auto data = rows_of(digits(resnet::Digits::Part::kTraining), mesh, /*shuffle=*/true);
  const auto test_data = digits(resnet::Digits::Part::kTest);
  const auto steps = count_steps(data.batches_per_epoch());
  auto model = make_model(mesh);
  if (examples::rank() == 0) std::cout << tessera::summary(*model) << std::endl;

  torch::optim::SGD optimizer(model->parameters(),
                              torch::optim::SGDOptions(absl::GetFlag(FLAGS_lr)).momentum(0.9).weight_decay(5e-4));
  tessera::WarmupCosineLR schedule(optimizer, {.warmup_steps = steps / 10, .total_steps = steps, .start_ratio = 0.1});
  tessera::AveragedModel average(*model, tessera::ema(0.98, tessera::EmaWarmup{}), {.use_buffers = true}); // BatchNorm's too
  tessera::Trainer<Batch> trainer(*model, optimizer, trainer_options(mesh, steps));
  trainer.loss([&](const Batch& batch) { return loss_of(model, batch, mesh.device()); })
      .data(tessera::prefetch(std::move(data)))
      .schedule(schedule)
      .average(average)
      .evaluate("weights", rows_of(test_data, mesh, /*shuffle=*/false))
      .evaluate("averaged", rows_of(test_data, mesh, /*shuffle=*/false), nullptr, &average)
      .on_step([](const tessera::StepEvent& step, tessera::Control& control) {
        if (step.ends_epoch) control.evaluate();
      });
  if (trainer.run().steps == steps) {
    const tessera::AveragedWeights averaged(average, *model);
    export_weights(model);
  }
  tessera::destroy_process_group();
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("train_resnet", [&] {
    examples::parse_command_line(argc, argv, "trains a residual network, sharded over ranks", "resnet/train_resnet.cpp");
    return examples::run_ranks(absl::GetFlag(FLAGS_ranks), train);
  });
}
