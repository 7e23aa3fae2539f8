// Trains a model that Python exported as TorchScript, sharded over ranks, and saves it as a file that Python loads.
//
//   .venv/bin/python examples/finetune_torchscript/export_model.py runs/torchscript
//   build/release/bin/finetune_torchscript --ranks 2 --folder runs/torchscript
//   .venv/bin/python -c 'import torch; print(torch.jit.load("runs/torchscript/trained.pt"))'

#include <absl/flags/flag.h>
#include <tessera/tessera.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "common/command_line.h"
#include "common/program.h"
#include "common/ranks.h"

ABSL_FLAG(int, ranks, 0, "local ranks to start; 0: this process is a rank that torchrun or Slurm started, or the only one");
ABSL_FLAG(std::string, folder, "runs/torchscript",
          "has model.pt and sequences.pt, as export_model.py writes them; gets trained.pt");
ABSL_FLAG(int64_t, steps, 20, "steps of SGD");
ABSL_FLAG(int64_t, rows, 12, "rows of a batch, of all ranks together");
ABSL_FLAG(double, lr, 0.1, "learning rate");
ABSL_FLAG(std::string, groups, "EncoderLayer", "class of the submodules that are groups of their own; empty: one group");
ABSL_FLAG(
    std::string, statistics, "synchronized",
    "of batch norms: synchronized (over the rows of all ranks), frozen (those of the export), or local (of each rank's rows; "
    "the running ones are averaged over the ranks at the end). A traced batch norm keeps the mode in which it was traced");

namespace {

struct Sequences {
  torch::Tensor x, y;
};

/// What torch.save wrote: a dict of two tensors.
Sequences read_sequences(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path.string());
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  const auto dict = torch::pickle_load(bytes).toGenericDict();
  return {dict.at("x").toTensor(), dict.at("y").toTensor()};
}

/// This rank's rows of a step.
Sequences share_of_batch(const Sequences& all, int64_t step) {
  const auto rows = absl::GetFlag(FLAGS_rows), share = rows / examples::world_size();
  const auto first = step * rows + examples::rank() * share;
  const auto chosen = torch::remainder(torch::arange(first, first + share), all.x.size(0));
  return {all.x.index_select(0, chosen), all.y.index_select(0, chosen)};
}

tessera::ScriptModule load_and_shard(const std::filesystem::path& path, const tessera::DeviceMesh& mesh) {
  const auto script = torch::jit::load(path.string());
  const auto groups = absl::GetFlag(FLAGS_groups);
  return groups.empty() ? tessera::fully_shard(script, mesh)
                        : tessera::fully_shard(script, mesh, tessera::submodules_of_class(groups));
}

enum class Statistics { kSynchronized, kFrozen, kLocal };
const examples::Choices<Statistics> kStatistics = {
    {"synchronized", Statistics::kSynchronized}, {"frozen", Statistics::kFrozen}, {"local", Statistics::kLocal}};

Statistics statistics() { return examples::choose("statistics", absl::GetFlag(FLAGS_statistics), kStatistics); }

/// In evaluation mode a batch norm computes with its running statistics; its weight and bias are trained all the same.
void freeze_statistics(torch::nn::Module& model) {
  for (const auto& module : model.modules()) {
    if (module->name().starts_with("BatchNorm")) module->eval();
  }
}

void check_flags() {
  statistics();
  examples::check_at_least<int64_t>("steps", absl::GetFlag(FLAGS_steps), 1);
  const auto rows = absl::GetFlag(FLAGS_rows);
  examples::check_at_least<int64_t>("rows", rows, 1);
  TORCH_CHECK(rows % examples::world_size() == 0, "--rows is ", rows, ", which ", examples::world_size(),
              " ranks cannot share evenly");
}

void worker() {
  examples::join_job(/*threads=*/0);
  check_flags();
  const std::filesystem::path folder = absl::GetFlag(FLAGS_folder);
  const auto mesh = tessera::init_device_mesh(torch::kCPU, {examples::world_size()}, {"shard"});
  const auto data = read_sequences(folder / "sequences.pt");
  auto model = load_and_shard(folder / "model.pt", mesh);
  model->train();
  if (statistics() == Statistics::kFrozen) freeze_statistics(*model);
  if (statistics() == Statistics::kSynchronized) tessera::convert_sync_batch_norm(*model, mesh);

  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(absl::GetFlag(FLAGS_lr)).momentum(0.9));
  for (int64_t step = 0; step < absl::GetFlag(FLAGS_steps); ++step) {
    const auto [x, y] = share_of_batch(data, step);
    optimizer.zero_grad();
    const auto loss = torch::cross_entropy_loss(model->forward(x), y);
    loss.backward();
    tessera::clip_grad_norm_(*model, 1.0);
    optimizer.step();
    const auto mean = examples::mean_over_ranks({loss.item<double>()})[0];
    if (examples::rank() == 0) std::printf("step %2ld  loss %.9g\n", static_cast<long>(step + 1), mean);
    std::fflush(stdout);
  }
  if (statistics() == Statistics::kLocal) tessera::average_buffers(*model, mesh);
  tessera::checkpoint::save_script(model, folder / "trained.pt", {.overwrite = true});
  tessera::destroy_process_group();
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("finetune_torchscript", [&] {
    examples::parse_command_line(argc, argv, "Trains a TorchScript export, sharded over ranks.",
                                 "finetune_torchscript/finetune_torchscript.cpp");
    return examples::run_ranks(absl::GetFlag(FLAGS_ranks), worker);
  });
}
