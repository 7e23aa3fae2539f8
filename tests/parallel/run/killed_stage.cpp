// A pipeline whose middle rank is killed in its second step. Every other rank prints what it hears.
//
//   killed_stage --ranks 3
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <csignal>
#include <iostream>

namespace {

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t depth) {
    for (int64_t i = 0; i < depth; ++i) linears.emplace_back(register_module(c10::str("linear", i), torch::nn::Linear(4, 4)));
  }
  std::vector<torch::nn::Linear> linears;
};

void train() {
  const int64_t ranks = tessera::process_context().world_size(), rank = tessera::process_context().rank();
  StackImpl stack(ranks);
  int64_t steps = 0;
  tessera::PipelineLayers layers(stack);
  for (int64_t i = 0; i < ranks; ++i) {
    layers.add(c10::str("layer", i), {c10::str("linear", i)}, [&, i](const torch::Tensor& x) {
      if (steps == 1 && rank == ranks / 2) (void)std::raise(SIGKILL);
      return stack.linears[static_cast<size_t>(i)](x).tanh();
    });
  }
  const tessera::PipelineLoss loss{
      .sum = [](const tessera::PipelineValue& output, const tessera::PipelineValue&) { return output.toTensor().sum(); }};
  const auto mesh = tessera::init_device_mesh(torch::kCPU, {ranks}, {"pp"});
  tessera::Pipeline pipeline(tessera::split(layers, mesh), tessera::PipelineScheduleKind::k1F1B, loss);
  for (; steps < 2; ++steps) pipeline.step(std::vector<tessera::PipelineValue>(4, torch::ones({2, 4})));
}

void worker() {
  tessera::init_process_group();
  at::set_num_threads(1);
  try {
    train();
  } catch (const c10::Error& error) {
    std::cout << "rank " << tessera::process_context().rank() << " hears: " << error.what_without_backtrace() << std::endl;
    throw;
  }
}

} // namespace

int main(int argc, char** argv) {
  try {
    return tessera::launch(tessera::ranks_from_args(argc, argv).value_or(2), worker);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
