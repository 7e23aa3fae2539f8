// Trains a residual network on images of handwritten digits, sharded over ranks, with what an everyday training needs. A run goes
// on from the newest checkpoint in runs/resnet where there is one, on any number of ranks.
//
//   scripts/setup --digits
//   build/release/bin/train_resnet --ranks 4 --replicas 2
#include <absl/flags/flag.h>
#include <fmt/format.h>
#include <tessera/tessera.h>

#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "common/command_line.h"
#include "common/json_lines.h"
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
using Means = std::map<std::string, double>; // by name, as "loss"

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

// Each row once an epoch: the last batches of some ranks may be smaller by a row.
tessera::DistributedSampler make_sampler(const resnet::Digits& data, const tessera::DeviceMesh& mesh, bool shuffle) {
  return {data.rows(), mesh, {.shuffle = shuffle, .seed = absl::GetFlag(FLAGS_seed), .last_rows = tessera::LastRows::kUneven}};
}

auto make_loader(resnet::Digits data, const tessera::DistributedSampler& sampler) {
  return torch::data::make_data_loader(data.map(torch::data::transforms::Stack<>()), sampler,
                                       torch::data::DataLoaderOptions(rows_a_rank()).workers(1));
}

int64_t count_steps(const tessera::DistributedSampler& sampler) {
  const auto batches = sampler.batches_per_epoch(rows_a_rank()), micro_batches = absl::GetFlag(FLAGS_micro_batches);
  return absl::GetFlag(FLAGS_epochs) * ((batches + micro_batches - 1) / micro_batches);
}

class Training {
 public:
  Training() {
    if (examples::rank() == 0) std::cout << tessera::summary(*model_) << std::endl;
    resume();
    log_.emplace(examples::rank() == 0 ? absl::GetFlag(FLAGS_log) : "", /*append=*/step_ > 0);
  }

  void run() {
    evaluate();
    while (step_ < last_step_) train_epoch();
    checkpointer_.wait(); // throws if the last save failed
    if (step_ < total_steps_) return;
    const tessera::AveragedWeights averaged(average_, *model_);
    const auto weights = tessera::state_dict(*model_);
    const auto to = absl::GetFlag(FLAGS_export_to);
    tessera::checkpoint::save_hugging_face(weights, to, {.overwrite = true});
    tessera::checkpoint::save_torch(weights, to + ".pt", {.overwrite = true}); // for torch.load in Python, and torch::load
  }

 private:
  void train_epoch() {
    sampler_.set_epoch(epoch_, row_);
    const auto loader = make_loader(data_, sampler_);
    for (auto batch = loader->begin(); batch != loader->end() && step_ < last_step_;) {
      std::vector<Batch> micro_batches; // the last step of an epoch may have fewer
      for (; batch != loader->end() && micro_batches.size() < most_; ++batch) micro_batches.push_back(*batch);
      report("step", train_step(micro_batches));
      const bool ends_epoch = row_ >= data_.rows(), is_last = step_ == last_step_;
      if (ends_epoch) ++epoch_, row_ = 0;
      if (ends_epoch || is_last) evaluate();
      if (is_last || step_ % absl::GetFlag(FLAGS_save_every) == 0) save();
    }
  }

  Means train_step(const std::vector<Batch>& micro_batches) {
    tessera::manual_seed(absl::GetFlag(FLAGS_seed), step_, mesh_); // this rank's dropout
    double mine = 0;
    for (const auto& batch : micro_batches) mine += static_cast<double>(batch.target.size(0));
    const auto rows = tessera::all_reduce({{"rows", mine}}, mesh_, tessera::ReduceOp::kSum).at("rows");

    tessera::RunningMeans means({"loss", "accuracy"});
    optimizer_.zero_grad();
    for (const auto& batch : micro_batches) {
      std::optional<tessera::NoSync> accumulate; // only the last backward communicates gradients
      if (strategy() != Strategy::kNone && &batch != &micro_batches.back()) accumulate.emplace(*model_);
      const auto scores = model_->forward(batch.data.to(mesh_.device()));
      const auto target = batch.target.to(mesh_.device());
      const auto loss = F::cross_entropy(scores, target);
      const auto count = static_cast<double>(target.size(0));
      (loss * (count * static_cast<double>(mesh_.size()) / rows)).backward(); // so each row of the step counts alike
      means.add("loss", loss.item<double>(), count);
      means.add_accuracy("accuracy", scores, target);
    }
    auto result = means.means(mesh_);
    result["grad_norm"] = tessera::clip_grad_norm_(*model_, /*max_norm=*/1.0).item<double>();
    optimizer_.step();
    schedule_.step();
    average_.update_parameters(*model_);
    ++step_;
    row_ += static_cast<int64_t>(rows);
    return result;
  }

  void evaluate() {
    report("evaluation", evaluate_weights());
    const tessera::AveragedWeights averaged(average_, *model_);
    report("averaged", evaluate_weights());
  }

  Means evaluate_weights() {
    const torch::NoGradGuard no_grad;
    model_->eval();
    tessera::RunningMeans means({"loss", "accuracy"});
    const auto loader = make_loader(test_data_, make_sampler(test_data_, mesh_, /*shuffle=*/false));
    for (const auto& batch : *loader) {
      const auto scores = model_->forward(batch.data.to(mesh_.device())), target = batch.target.to(mesh_.device());
      means.add("loss", F::cross_entropy(scores, target, F::CrossEntropyFuncOptions().reduction(torch::kNone)));
      means.add_accuracy("accuracy", scores, target);
    }
    model_->train();
    return means.means(mesh_);
  }

  tessera::StateDict state() {
    auto state = tessera::state_dict(*model_, optimizer_);
    state.merge(tessera::state_dict(schedule_));
    state.merge(tessera::state_dict(average_));
    state.set("step", step_);
    state.set("epoch", epoch_);
    state.set("row", row_);
    return state;
  }

  void save() {
    const auto folder = std::filesystem::path(absl::GetFlag(FLAGS_checkpoint)) / fmt::format("step-{:06}", step_);
    checkpointer_.save(state(), folder, {.overwrite = true, .keep_last = 2}); // in the background
  }

  void resume() {
    const auto folder = tessera::checkpoint::latest(absl::GetFlag(FLAGS_checkpoint));
    if (folder.empty()) return;
    auto saved = state();
    tessera::checkpoint::load(saved, folder);
    step_ = saved.value<int64_t>("step");
    epoch_ = saved.value<int64_t>("epoch");
    row_ = saved.value<int64_t>("row");
    if (examples::rank() == 0) std::cout << "goes on from " << folder.string() << std::endl;
  }

  void report(const std::string& kind, const Means& values) {
    if (examples::rank() != 0) return;
    nlohmann::ordered_json record{{"kind", kind}, {"step", step_}};
    record.update(values);
    log_->write(record);
    if (kind == "step" && step_ % 10 != 0) return;
    fmt::print("{:<10} step {:4}  loss {:.4f}  accuracy {:.4f}\n", kind, step_, values.at("loss"), values.at("accuracy"));
    std::fflush(stdout);
  }

  const tessera::DeviceMesh mesh_ = make_mesh();
  const resnet::Digits data_{absl::GetFlag(FLAGS_data), resnet::Digits::Part::kTraining, data_dtype()};
  const resnet::Digits test_data_{absl::GetFlag(FLAGS_data), resnet::Digits::Part::kTest, data_dtype()};
  tessera::DistributedSampler sampler_ = make_sampler(data_, mesh_, /*shuffle=*/true);
  const size_t most_ = static_cast<size_t>(absl::GetFlag(FLAGS_micro_batches)); // micro-batches of a step
  const int64_t total_steps_ = count_steps(sampler_);
  const int64_t last_step_ = std::min(absl::GetFlag(FLAGS_stop_after), total_steps_);
  resnet::ResNet model_ = make_model(mesh_);
  torch::optim::SGD optimizer_{model_->parameters(),
                               torch::optim::SGDOptions(absl::GetFlag(FLAGS_lr)).momentum(0.9).weight_decay(5e-4)};
  tessera::WarmupCosineLR schedule_{optimizer_,
                                    {.warmup_steps = total_steps_ / 10, .total_steps = total_steps_, .start_ratio = 0.1}};
  tessera::AveragedModel average_{*model_, tessera::ema(0.98, tessera::EmaWarmup{}), {.use_buffers = true}}; // BatchNorm's too
  tessera::checkpoint::Checkpointer checkpointer_;
  std::optional<examples::JsonLines> log_;
  int64_t step_ = 0, epoch_ = 0, row_ = 0; // of the training; of this epoch the rows of all ranks
};

void train() {
  examples::check_at_least<int64_t>("micro-batches", absl::GetFlag(FLAGS_micro_batches), 1);
  examples::check_at_least<int64_t>("save-every", absl::GetFlag(FLAGS_save_every), 1);
  examples::join_job(/*threads=*/0);
  Training().run();
  tessera::destroy_process_group();
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("train_resnet", [&] {
    examples::parse_command_line(argc, argv, "trains a residual network, sharded over ranks", "resnet/train_resnet.cpp");
    return examples::run_ranks(absl::GetFlag(FLAGS_ranks), train);
  });
}
