// Trains a small residual network with FSDP on local ranks, saves a checkpoint, and loads it again.
//
//   build/release/bin/getting_started --ranks 4
//   torchrun --no-python --nproc-per-node 4 build/release/bin/getting_started

#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <string_view>

namespace {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  ModelImpl(int64_t inputs, int64_t width, int64_t depth)
      : embed(register_module("embed", torch::nn::Linear(inputs, width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        head(register_module("head", torch::nn::Linear(width, 1))) {
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block(width));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = embed(x);
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(x);
  }
  torch::nn::Linear embed;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(Model);

void worker() {
  tessera::init_process_group(); // torchrun, Slurm, mpirun, or tessera::launch
  const auto& context = tessera::process_context();
  const auto mesh = tessera::init_device_mesh(torch::kCPU, {context.world_size()}, {"shard"});

  torch::manual_seed(0); // the same initial weights on every rank
  Model model(8, 64, 4);
  for (auto& block : *model->blocks) tessera::fully_shard(*block, mesh);
  tessera::fully_shard(*model, mesh);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));

  torch::manual_seed(100 + context.rank()); // every rank its own data
  for (int step = 0; step <= 100; ++step) {
    const auto x = torch::randn({64, 8}), y = x.sin().sum(1, /*keepdim=*/true);
    auto loss = torch::mse_loss(model->forward(x), y);
    optimizer.zero_grad();
    loss.backward();
    tessera::clip_grad_norm_(*model, 1.0); // the global norm
    optimizer.step();
    if (context.rank() == 0 && step % 20 == 0) {
      std::printf("step %3d  loss of rank 0 %.4f\n", step, loss.item<double>());
      std::fflush(stdout);
    }
  }

  const auto folder = std::filesystem::temp_directory_path() / "tessera-getting-started";
  tessera::checkpoint::save(tessera::state_dict(*model, optimizer), folder, {.overwrite = true});
  tessera::checkpoint::load(tessera::state_dict(*model, optimizer), folder); // at any number of ranks
  if (context.rank() == 0) {
    std::printf("%s\n", tessera::DTensor(model->head->weight).spec().to_string().c_str());
    std::printf("checkpoint in %s\n", folder.c_str());
  }
  tessera::destroy_process_group();
}

// Nothing but `--ranks n` or `--ranks=n`.
void check_arguments(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument(argv[i]);
    const bool has_number_next = argument == "--ranks";
    TORCH_CHECK(has_number_next || argument.starts_with("--ranks="), "the argument ", argument,
                " is unknown; usage: getting_started [--ranks n]");
    if (has_number_next) ++i;
  }
}

} // namespace

int main(int argc, char** argv) {
  try {
    check_arguments(argc, argv);
    if (const auto ranks = tessera::ranks_from_args(argc, argv)) return tessera::launch(*ranks, worker);
    worker();
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "getting_started: %s\n", error.what_without_backtrace());
  }
  return 1;
}
